"""The format of Llama 3: JSON objects with a name and parameters, in an array or separated by semicolons."""

from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Reader, Steps

PYTHON_TAG = "<|python_tag|>"


def call(reader: Reader) -> Steps:
    """Read calls, which may have a tag. The result says whether there are any."""
    yield from reader.literal(PYTHON_TAG)
    return (yield from json_calls(reader, ("parameters", "arguments")))


def llama3_json(reader: Reader) -> Steps:
    """Read calls wherever an object or an array begins that is a call; others are text."""
    while tag := (yield from reader.until((PYTHON_TAG, "[", "{"), reader.content)):
        yield from reader.attempt(tag, call, reader.drop if tag == PYTHON_TAG else reader.content)
