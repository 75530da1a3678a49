"""The format of Hermes and Qwen: a JSON object, or an array of them, between <tool_call> and </tool_call>."""

from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Reader, Steps

START, END = "<tool_call>", "</tool_call>"


def hermes(reader: Reader) -> Steps:
    """Read calls between tags; a tag without a valid call is text."""
    while (yield from reader.until((START,), reader.content)):
        if (yield from json_calls(reader)):
            yield from reader.until((END,), reader.drop)
        else:
            reader.content(START)
