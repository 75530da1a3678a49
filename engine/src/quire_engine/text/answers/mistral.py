"""The formats of Mistral: [TOOL_CALLS] before an array of JSON objects, or before a name and its arguments."""

import re

from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Reader, Steps

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (CALLS, CALL_ID, ARGUMENTS)
_NAME = re.compile(r"[\w.:/-]{1,256}")


def mistral(reader: Reader) -> Steps:
    """Read calls in the form of any version of Mistral's tokenizer; what follows a tag and is no call is text."""
    while (yield from reader.until((CALLS,), reader.content)):
        reader.record()
        first = yield from reader.space()
        reader.restore()
        if first in ("[", "{"):
            yield from json_calls(reader)
        else:
            yield from _named(reader)


def _named(reader: Reader) -> Steps:
    """Read a name, [CALL_ID] and an id if there is one, [ARGS] if it is there, and arguments."""
    reader.record()
    name, tag = yield from reader.take_until((CALL_ID, ARGUMENTS, "{"))
    id = None
    if tag == CALL_ID:
        id, tag = yield from reader.take_until((ARGUMENTS, "{"))
    if not tag or _NAME.fullmatch(name.strip()) is None:
        reader.restore()
        return
    reader.forget()
    if tag == "{":
        reader.text = tag + reader.text
    reader.start_call(name.strip(), id and id.strip())
    yield from reader.json_value(reader.arguments)
