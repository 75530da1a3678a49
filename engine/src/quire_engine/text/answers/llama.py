"""The format of Llama 3: a JSON object with a name and parameters, several separated by semicolons."""

from quire_engine.text.answers.json_call import json_call
from quire_engine.text.answers.reader import Reader, Steps

PYTHON_TAG = "<|python_tag|>"


def llama3_json(reader: Reader) -> Steps:
    """Read calls wherever an object begins that is a call; other objects are text."""
    while tag := (yield from reader.until((PYTHON_TAG, "{"), reader.content)):
        if tag == PYTHON_TAG:
            continue
        reader.text = tag + reader.text
        if not (yield from json_call(reader, ("parameters", "arguments"))):
            yield from reader.literal("{")
            reader.content("{")
