"""The formats of DeepSeek V3, R1 and V3.1: a name and JSON arguments between tags of one token each."""

from functools import partial

from quire_engine.text.answers.reader import Reader, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)


def _deepseek(reader: Reader, *, fenced: bool) -> Steps:
    while (yield from reader.until((CALLS,), reader.content)):
        reader.record()
        yield from reader.space()
        if not (yield from reader.literal(CALL)):
            reader.restore()
            reader.content(CALLS)
            continue
        reader.forget()
        while True:
            yield from _call(reader, fenced=fenced)
            yield from reader.space()
            if not (yield from reader.literal(CALL)):
                break
        yield from reader.until((CALLS_END,), reader.drop)


def _call(reader: Reader, *, fenced: bool) -> Steps:
    """Read one call after its first tag: ``type, separator, name, fence`` in V3, ``name, separator`` in V3.1."""
    head, tag = yield from reader.take_until((SEPARATOR, CALL_END))
    if tag != SEPARATOR:
        return
    if fenced:
        head, found = yield from reader.take_until(("\n```json", CALL_END))
        if found == CALL_END or not found:
            return
    if not head.strip():
        return
    reader.start_call(head.strip())
    yield from reader.json_value(reader.arguments)
    yield from reader.until((CALL_END,), reader.drop)


deepseek_v3 = partial(_deepseek, fenced=True)
deepseek_v31 = partial(_deepseek, fenced=False)
