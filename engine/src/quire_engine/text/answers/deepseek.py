"""The formats of DeepSeek V3, R1 and V3.1: a name and JSON arguments between tags of one token each."""

from functools import partial

from quire_engine.text.answers.reader import Reader, Steps, tagged

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)


def _calls(reader: Reader, *, fenced: bool) -> Steps:
    """Read the calls of an answer. The result is False where the first cannot be read."""
    yield from reader.literal(CALLS)
    yield from reader.space()
    if not (yield from _call(reader, fenced=fenced)):
        return False
    call = partial(_call, fenced=fenced)
    while (yield from reader.until((CALL, CALLS_END), reader.content)) == CALL:
        yield from reader.attempt(CALL, call, reader.invalid_call)
    return True


def _call(reader: Reader, *, fenced: bool) -> Steps:
    """Read one call: ``type, separator, name, fence`` in V3, ``name, separator`` in V3.1.

    The result is False where the text is no call.
    """
    if not (yield from reader.literal(CALL)):
        return False
    name = yield from reader.name()
    if not name or not (yield from reader.literal(SEPARATOR)):
        return False
    if fenced:
        name = yield from reader.name()
        yield from reader.space()
        if not name or not (yield from reader.literal("```json")):
            return False
    reader.start_call(name)
    yield from reader.json_value(reader.arguments)
    yield from reader.until((CALL_END,), reader.drop)
    return True


call_v3, call_v31 = partial(_calls, fenced=True), partial(_calls, fenced=False)
deepseek_v3, deepseek_v31 = tagged((CALLS,), call_v3), tagged((CALLS,), call_v31)
