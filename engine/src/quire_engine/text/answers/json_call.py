"""A tool call that is written as one JSON object with a name and arguments, which hermes, Llama and Mistral share."""

import json
from functools import partial

from quire_engine.text.answers.reader import Decoded, Reader, Sink, Steps, decoded


def json_call(reader: Reader, argument_keys: tuple[str, ...] = ("arguments",)) -> Steps:
    """Read a call. The result is False where the text is no call: no event was added then.

    The call starts as soon as its name and the start of its arguments are known; what follows cannot make it text.
    """
    call = _Call(reader, argument_keys)
    complete = yield from call.read()
    return call.started or (complete and call.start_with_held())


def json_calls(reader: Reader, argument_keys: tuple[str, ...] = ("arguments",), otherwise: Sink | None = None) -> Steps:
    """Read calls in an array or one after another. The result is False where the first is no call.

    A later object that is no call ends them. Its bracket is passed to ``otherwise``, which makes it text by default.
    """
    if (yield from reader.space()) == "[":
        yield from reader.literal("[")
    if not (yield from json_call(reader, argument_keys)):
        return False
    call = partial(json_call, argument_keys=argument_keys)
    while True:
        if (yield from reader.space()) and (yield from reader.literal(",", ";")):
            yield from reader.space()
        if not (yield from reader.literal("{")):
            return True
        if not (yield from reader.attempt("{", call, otherwise or reader.invalid_call)):
            return True


class _Call:
    def __init__(self, reader: Reader, argument_keys: tuple[str, ...]) -> None:
        self._reader = reader
        self._argument_keys = argument_keys
        self._name: str | None = None
        self._held: str | None = None
        self.started = False

    def read(self) -> Steps:
        """Read the object. The result says whether it is complete."""
        reader = self._reader
        if (yield from reader.space()) != "{":
            return False
        yield from reader.literal("{")
        while True:
            if (yield from reader.space()) != '"':
                return False
            key = yield from reader.json_text()
            if key is None:
                return False
            yield from reader.space()
            if not (yield from reader.literal(":")):
                return False
            if not (yield from self._value(json.loads(key))):
                return False
            if (yield from reader.space()) != ",":
                return (yield from reader.literal("}"))
            yield from reader.literal(",")

    def _value(self, key: str) -> Steps:
        reader = self._reader
        if key in self._argument_keys and self._name is not None and (yield from reader.object_ahead()):
            return (yield from self._streamed(self._name))
        text = yield from reader.json_text()
        if text is None:
            return False
        if key in self._argument_keys:
            self._held = text
        elif key == "name":
            name = json.loads(text)
            self._name = name if isinstance(name, str) else None
        return True

    def _streamed(self, name: str) -> Steps:
        """Start the call and pass its arguments on as they arrive; a second object of arguments is dropped."""
        if self.started:
            return (yield from self._reader.json_value(self._reader.drop))
        self._reader.start_call(name)
        self.started = True
        return (yield from self._reader.json_value(self._reader.arguments))

    def start_with_held(self) -> bool:
        """Start a call whose arguments came before its name, or as a string. Returns whether it is a call."""
        if self._name is None or self._held is None:
            return False
        self._reader.start_call(self._name)
        self._reader.arguments(as_arguments(self._held))
        return True


def as_arguments(text: str) -> str:
    """Return the arguments of a JSON value: a string that contains an object is that object, null is an empty one."""
    value = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        inner: Decoded | None = decoded(value)
        if inner is not None and isinstance(inner.value, dict):
            return value
    return text
