"""The format of Hermes and Qwen: JSON objects, or an array of them, between <tool_call> and </tool_call>."""

from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Reader, Steps, tagged

START, END = "<tool_call>", "</tool_call>"


def call(reader: Reader) -> Steps:
    """Read the calls between two tags. The result says whether there are any."""
    yield from reader.literal(START)
    found = yield from json_calls(reader)
    if found:
        yield from reader.until((END,), reader.content)
    return found


hermes = tagged((START,), call)
