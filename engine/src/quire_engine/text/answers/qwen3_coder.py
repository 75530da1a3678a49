"""The format of Qwen3-Coder: a tag for the function and one for each parameter, whose values are plain text."""

from quire_engine.text.answers.reader import Reader, Steps, tagged
from quire_engine.text.answers.typed import ArgumentWriter

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def call(reader: Reader) -> Steps:
    """Read a call, whose outer tag models sometimes omit. The result says whether it is one."""
    if (yield from reader.literal(CALL)):
        yield from reader.space()
    if not (yield from reader.literal(FUNCTION)):
        return False
    name = yield from reader.name()
    if not name or not (yield from reader.literal(">")):
        return False
    yield from _parameters(reader, ArgumentWriter(reader, name))
    return True


qwen3_coder = tagged((CALL, FUNCTION), call)


def _parameters(reader: Reader, arguments: ArgumentWriter) -> Steps:
    """Read the parameters; models sometimes omit the tags that end a parameter or a function."""
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
