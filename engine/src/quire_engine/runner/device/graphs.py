"""Decode steps as captured CUDA graphs: one for each of a few batch sizes, to which other batches are padded.

A decode step of a large model is a few hundred launches, which take the host longer than the GPU if the batch is small;
a graph is one launch. Batches with prompts are not captured: they have many different shapes, and enough work to hide
their launches.
"""

from bisect import bisect_left
from collections.abc import Callable

from quire_engine.runner.device.accelerator import Accelerator, Graph


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return ascending sizes up to ``max_num_seqs``; the padding is at most 7 up to 64 sequences, and 15 up to 256."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphStore:
    """The captured graphs. ``sizes`` are ascending; an empty tuple disables graphs."""

    def __init__(self, accelerator: Accelerator, sizes: tuple[int, ...]) -> None:
        assert list(sizes) == sorted(set(sizes)) and all(size > 0 for size in sizes), sizes
        self._accelerator = accelerator
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def capture(self, work_of: Callable[[int], Callable[[], None]]) -> None:
        """Capture each size; ``work_of(size)`` issues its step.

        The largest is first, so that others reuse its memory.
        """
        for size in reversed(self._sizes):
            self._graphs[size] = self._accelerator.capture(work_of(size))

    def size_for(self, sequences: int) -> int | None:
        """Return the smallest captured size that fits, or None."""
        if not self._graphs:
            return None
        place = bisect_left(self._sizes, sequences)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()

    def close(self) -> None:
        self._graphs.clear()
