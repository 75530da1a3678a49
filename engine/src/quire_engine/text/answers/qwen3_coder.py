"""The format of Qwen3-Coder: a tag for the function and one for each parameter, whose values are plain text."""

from quire_engine.text.answers.reader import Reader, Steps
from quire_engine.text.answers.typed import ArgumentWriter

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def qwen3_coder(reader: Reader) -> Steps:
    """Read calls; models sometimes omit the outer tag, or the tags that end a parameter or a function."""
    while tag := (yield from reader.until((CALL, FUNCTION), reader.content)):
        if tag == CALL:
            reader.record()
            yield from reader.space()
            if not (yield from reader.literal(FUNCTION)):
                reader.restore()
                reader.content(CALL)
                continue
            reader.forget()
        reader.record()
        name, end = yield from reader.take_until((">", "\n", FUNCTION_END))
        if end != ">" or not name.strip():
            reader.restore()
            reader.content(tag if tag == FUNCTION else CALL + FUNCTION)
            continue
        reader.forget()
        yield from _parameters(reader, ArgumentWriter(reader, name.strip()))


def _parameters(reader: Reader, arguments: ArgumentWriter) -> Steps:
    ends = (PARAMETER, FUNCTION_END, CALL_END)
    tag = yield from reader.until(ends, reader.drop)
    while tag == PARAMETER:
        name, end = yield from reader.take_until((">",))
        if not end:
            return
        value, tag = yield from reader.take_until((PARAMETER_END, *ends))
        if not tag:
            return
        # The value has a line of its own.
        arguments.add(name.strip(), value.removeprefix("\n").removesuffix("\n"))
        if tag == PARAMETER_END:
            tag = yield from reader.until(ends, reader.drop)
    if tag:
        arguments.close()
