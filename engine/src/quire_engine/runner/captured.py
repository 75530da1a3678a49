"""Steps as captured CUDA graphs: one for each of a few sizes of a batch, to which other batches are padded.

A step of a large model is a few hundred launches, which take the host longer than the GPU if the batch is small; a
graph is one launch. There are two kinds. A *decode* graph has one token for each of its sequences. A *mixed* graph has
a number of tokens, which any sequences may share: everything that differs between its batches is in device memory. From
about a thousand tokens on, the GPU works for longer than the host needs to launch, and nothing is captured.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.runner.accelerator import Accelerator, Graph

_VERIFIED_SIZES = (2, 4, 8, 12, 16, 24, 32, 48)
_MIXED_SIZES = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The size of a captured step: the tokens of a mixed batch, or the sequences of a decode batch."""

    size: int
    is_mixed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The sizes to capture, ascending; without any, steps run launch by launch."""

    decode: tuple[int, ...] = ()
    """Numbers of sequences."""
    mixed: tuple[int, ...] = ()
    """Numbers of tokens."""

    def __post_init__(self) -> None:
        for sizes in (self.decode, self.mixed):
            assert list(sizes) == sorted(set(sizes)) and all(size > 0 for size in sizes), sizes

    def within(self, *, sequences: int, tokens: int) -> "GraphSizes":
        """Return the sizes that a step of at most so many sequences and tokens can have."""
        return GraphSizes(
            decode=tuple(size for size in self.decode if size <= sequences),
            mixed=tuple(size for size in self.mixed if size <= tokens),
        )

    def largest(self, count: int) -> "GraphSizes":
        """Return the ``count`` sizes that are captured first."""
        first = self.in_order()[:count]
        return GraphSizes(
            decode=tuple(key.size for key in reversed(first) if not key.is_mixed),
            mixed=tuple(key.size for key in reversed(first) if key.is_mixed),
        )

    def in_order(self) -> list[GraphKey]:
        """Return the graphs in the order of their capture: the largest first, so that others reuse its memory."""
        mixed = [GraphKey(size, is_mixed=True) for size in self.mixed]
        return sorted(
            [*mixed, *(GraphKey(size, is_mixed=False) for size in self.decode)],
            key=lambda key: (key.size, key.is_mixed),
            reverse=True,
        )


def default_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return ascending sizes up to ``max_num_seqs``; the padding is at most 7 up to 64 sequences, and 15 up to 256."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def default_mixed_sizes(max_num_batched_tokens: int, *, verifies: bool = False) -> tuple[int, ...]:
    """Return ascending sizes up to 1,024 tokens, about a quarter apart; below 64 tokens weights are read anyway.

    An engine that ``verifies`` drafts has smaller sizes too: a few sequences with drafts are most of its steps.
    """
    sizes = (*(_VERIFIED_SIZES if verifies else ()), *_MIXED_SIZES)
    sizes = tuple(size for size in sizes if size < max_num_batched_tokens)
    return sizes if max_num_batched_tokens > _MIXED_SIZES[-1] else (*sizes, max_num_batched_tokens)


class GraphStore:
    """The captured graphs."""

    def __init__(self, accelerator: Accelerator, sizes: GraphSizes) -> None:
        self._accelerator = accelerator
        self._sizes = sizes
        self._graphs: dict[GraphKey, Graph] = {}

    def capture(
        self, work_of: Callable[[GraphKey], Callable[[], None]], captured: Callable[[], None] = lambda: None
    ) -> None:
        """Capture each size; ``work_of(key)`` issues its step. Call ``captured`` after each graph."""
        for key in self._sizes.in_order():
            self._graphs[key] = self._accelerator.capture(work_of(key))
            captured()

    def key_for(self, *, sequences: int, tokens: int) -> GraphKey | None:
        """Return the smallest captured step that a batch fits into, or None."""
        if not self._graphs:
            return None
        if sequences == tokens and (size := _smallest(self._sizes.decode, sequences)) is not None:
            return GraphKey(size, is_mixed=False)
        size = _smallest(self._sizes.mixed, tokens)
        return None if size is None else GraphKey(size, is_mixed=True)

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()

    def close(self) -> None:
        self._graphs.clear()


def _smallest(sizes: tuple[int, ...], least: int) -> int | None:
    place = bisect_left(sizes, least)
    return sizes[place] if place < len(sizes) else None
