"""The formats of Mistral: [TOOL_CALLS] before an array of JSON objects, or before a name and its arguments."""

from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Reader, Steps

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (CALLS, CALL_ID, ARGUMENTS)


def mistral(reader: Reader) -> Steps:
    """Read calls in the form of any version of Mistral's tokenizer; what follows a tag and is no call is text."""
    while tag := (yield from reader.until((CALLS,), reader.content)):
        yield from reader.attempt(tag, call, lambda _: reader.invalid_call(""))


def call(reader: Reader) -> Steps:
    """Read an array of calls, or a name, [CALL_ID] and an id if there is one, [ARGS] if it is there, and arguments.

    The result says whether there is a call.
    """
    yield from reader.literal(CALLS)
    if (yield from reader.space()) in ("[", "{"):
        return (yield from json_calls(reader))
    name = yield from reader.name()
    if not name:
        return False
    yield from reader.space()
    tag = yield from reader.literal(CALL_ID, ARGUMENTS, "{")
    id = None
    if tag == CALL_ID:
        id, tag = yield from reader.take_until((ARGUMENTS, "{"))
    if not tag:
        return False
    reader.start_call(name, id and id.strip())
    if tag == "{":
        reader.text = tag + reader.text
    yield from reader.json_value(reader.arguments)
    return True
