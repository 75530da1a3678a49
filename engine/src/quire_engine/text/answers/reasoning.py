"""Reasoning between two tags at the start of an answer, in whose place the prompt may have the first tag."""

from quire_engine.text.answers.reader import Format, Reader, Steps


def reasoning(
    reader: Reader,
    start: str,
    end: str,
    *,
    label: str = "",
    opened: bool = False,
    call: Format | None = None,
    call_tags: tuple[str, ...] = (),
) -> Steps:
    """Read the reasoning between two tags, and leave the answer after it.

    ``label`` is dropped where it follows the first tag. ``opened`` means that the prompt ends within the reasoning. A
    ``call`` ends it as well, and is read; one of ``call_tags`` without a call is part of the reasoning.
    """
    reader.record()
    yield from reader.space()
    if (yield from reader.literal(start)):
        reader.forget()
    else:
        reader.restore()
        if not opened:
            return
    if label:
        yield from reader.literal(label)
    while (tag := (yield from reader.until((end, *call_tags), reader.reasoning))) in call_tags:
        assert call is not None
        if (yield from reader.attempt(tag, call, reader.mention)):
            return
