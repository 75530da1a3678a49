"""Which replica has seen the beginning of a prompt before, and so may still hold its KV blocks.

Between ``proxy``, which has the request's body, and ``balance``, which weighs what a hit is worth. The engine hashes
blocks of tokens, each with its parent; the gateway, which has no tokenizer, does the same with blocks of the JSON text
of the prompt or the messages. A guess: a replica may have evicted what it is thought to hold.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import msgspec

BLOCK_BYTES = 256
"""Of JSON text: some sixty tokens, four of the engine's blocks."""
MAX_BLOCKS = 256
_MAX_ENTRIES = 32_768
_MAX_TOGETHER = 131_072
"""Some 20 MB. A model's own index has 5 when full: those of all that a cluster serves could be more than a pod has."""
_MAX_HOLDERS = 4
_LOOK_EACH = 1024
"""Blocks that may come before it is looked whether all indexes together have grown too large."""


class Prompt(msgspec.Struct):
    """What decides over cache hits in a body: left as the text it came as."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


def prompt_bytes(prompt: Prompt) -> int:
    """How long its text is."""
    return memoryview(prompt.messages).nbytes or memoryview(prompt.prompt).nbytes


def prompt_blocks(prompt: Prompt) -> tuple[int, ...]:
    """A hash for each whole block of the prompt's text, each one over all that came before it."""
    text = bytes(prompt.messages) or bytes(prompt.prompt)
    chain = hash(bytes(prompt.cache_salt))
    blocks = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        chain = hash((chain, text[start : start + BLOCK_BYTES]))
        blocks.append(chain)
    return tuple(blocks)


class PrefixIndex:
    """Who served which blocks last, of one model. What a replica can't hold any more is forgotten, for it was sent more
    tokens since than its KV cache has; and the least recently used, lest the index grow."""

    def __init__(self, *, max_entries: int = _MAX_ENTRIES, sent: Callable[[int], None] = lambda blocks: None) -> None:
        """``sent`` is told after how many blocks were sent somewhere."""
        self._holders: dict[int, tuple[tuple[str, float], ...]] = {}
        """Each with the tokens that it had been sent in all by then."""
        self._sent: dict[str, float] = {}
        self._max_entries, self._told = max_entries, sent

    def __len__(self) -> int:
        return len(self._holders)

    def shares(self, blocks: Sequence[int], capacities: Mapping[str, float]) -> Mapping[str, float]:
        """By replica: the share of these blocks, from the first one on without a gap, that it probably holds.

        ``capacities``: the tokens in the KV cache of each replica there is; infinite where it is not known.
        """
        found: dict[str, float] = {}
        leading = set(capacities)
        last: tuple[tuple[str, float], ...] | None = None
        for count, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            # Most blocks were sent along with the one before, and have the same holders.
            if holders != last:
                last = holders
                holding = {id_ for id_, at in holders if id_ in leading and self._sent[id_] - at <= capacities[id_]}
                if count:
                    found.update(dict.fromkeys(leading - holding, count / len(blocks)))
                leading = holding
                if not leading:
                    break
        if blocks:
            found.update(dict.fromkeys(leading, 1.0))
        return found

    def served(self, blocks: Sequence[int], id_: str, tokens: float) -> None:
        """That replica works on this prompt, of so many tokens, now."""
        holder = id_, self._sent.get(id_, 0.0) + tokens
        self._sent[id_] = holder[1]
        # From the end, so that of one prompt the beginning, which others may share, is forgotten last.
        for block in reversed(blocks):
            others = [other for other in self._holders.pop(block, ()) if other[0] != id_]
            self._holders[block] = (holder, *others)[:_MAX_HOLDERS]
        self.shrink(self._max_entries)
        self._told(len(blocks))

    def shrink(self, entries: int) -> None:
        """To at most so many, the least recently used first."""
        # Looked for once: a dict's first key is found by passing over the places of all that were first before.
        for block in list(islice(self._holders, max(0, len(self._holders) - entries))):
            del self._holders[block]

    def forget(self, ids: Collection[str]) -> None:
        """Replicas that are gone: one of the same name would begin with an empty cache."""
        gone = self._sent.keys() & set(ids)
        for id_ in gone:
            del self._sent[id_]
        if gone:
            for block, holders in self._holders.items():
                self._holders[block] = tuple(holder for holder in holders if holder[0] not in gone)


class PrefixIndexes:
    """Those of all models. Together they are bounded too: the largest give way until all fit."""

    def __init__(self, *, max_entries: int = _MAX_TOGETHER) -> None:
        self._indexes: set[PrefixIndex] = set()
        self._max_entries = max_entries
        self._sent = 0

    def open(self) -> PrefixIndex:
        """One more model's."""
        index = PrefixIndex(sent=self._count)
        self._indexes.add(index)
        return index

    def close(self, index: PrefixIndex) -> None:
        """Its model is gone."""
        self._indexes.discard(index)

    def _count(self, blocks: int) -> None:
        self._sent += blocks
        if self._sent >= _LOOK_EACH:
            self._sent = 0
            self._shrink()

    def _shrink(self) -> None:
        """All to one size, where they are larger: what the smaller leave free is shared by the larger."""
        free = self._max_entries
        if sum(map(len, self._indexes)) <= free:
            return
        by_size = sorted(self._indexes, key=len)
        for place, index in enumerate(by_size):
            share = free // (len(by_size) - place)
            index.shrink(share)
            free -= len(index)
