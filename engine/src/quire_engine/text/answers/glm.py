"""The format of GLM 4.5 and later: the name of a function, then tags around each key and each value."""

from quire_engine.text.answers.reader import Reader, Steps
from quire_engine.text.answers.typed import ArgumentWriter

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def glm(reader: Reader) -> Steps:
    """Read calls; a tag without a name is text."""
    while (yield from reader.until((CALL,), reader.content)):
        reader.record()
        name, tag = yield from reader.take_until((KEY, CALL_END))
        if not tag or not name.strip() or "\n" in name.strip():
            reader.restore()
            reader.content(CALL)
            continue
        reader.forget()
        arguments = ArgumentWriter(reader, name.strip())
        while tag == KEY:
            key, tag = yield from reader.take_until((KEY_END, VALUE, CALL_END))
            if tag == KEY_END:
                tag = yield from reader.until((VALUE, CALL_END), reader.drop)
            if tag != VALUE:
                break
            value, tag = yield from reader.take_until((VALUE_END, CALL_END))
            if not tag:
                break
            arguments.add(key.strip(), value)
            if tag == VALUE_END:
                tag = yield from reader.until((KEY, CALL_END), reader.drop)
        if tag:
            arguments.close()
