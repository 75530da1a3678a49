"""Reasoning between two tags at the start of an answer, in whose place the prompt may have the first tag."""

from quire_engine.text.answers.reader import Reader, Steps


def reasoning(
    reader: Reader, start: str, end: str, *, label: str = "", opened: bool = False, interrupts: tuple[str, ...] = ()
) -> Steps:
    """Read the reasoning between two tags, and leave the answer after it.

    ``label`` is dropped where it follows the first tag. ``opened`` means that the prompt ends within the reasoning. One
    of ``interrupts`` ends it as well, and is left.
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
    tag = yield from reader.until((end, *interrupts), reader.reasoning)
    if tag in interrupts:
        reader.text = tag + reader.text
