"""The format of GLM 4.5 and later: the name of a function, then tags around each key and each value."""

from quire_engine.text.answers.reader import Reader, Steps, tagged
from quire_engine.text.answers.typed import ArgumentWriter

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)


def call(reader: Reader) -> Steps:
    """Read a call: a name and a tag after it, which may be a stray one. The result says whether the text is a call."""
    yield from reader.literal(CALL)
    name = yield from reader.name()
    if not name:
        return False
    yield from reader.space()
    tag = yield from reader.literal(*MARKERS[1:])
    if not tag:
        return False
    arguments = ArgumentWriter(reader, name)
    if tag not in (KEY, CALL_END):
        tag = yield from reader.until((KEY, CALL_END), reader.drop)
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
    return True


glm = tagged((CALL,), call)
