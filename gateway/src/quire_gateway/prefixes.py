"""Which replica has seen the beginning of a prompt before, and so may still hold its KV blocks.

Between ``proxy``, which has the request's body, and ``balance``, which weighs what a hit is worth. The engine hashes
blocks of tokens, each with its parent; the gateway, which has no tokenizer, does the same with blocks of the JSON text
of the prompt or the messages. A guess: a replica may have evicted what it is thought to hold.
"""

from collections.abc import Mapping, Sequence

import msgspec

BLOCK_BYTES = 256
"""Of JSON text: some sixty tokens, four of the engine's blocks."""
MAX_BLOCKS = 256
_MAX_ENTRIES = 32_768
_MAX_HOLDERS = 4


class Prompt(msgspec.Struct):
    """What decides over cache hits in a body: left as the text it came as."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


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
    """Who served which blocks last, of one model; the least recently used are forgotten."""

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self._holders: dict[int, tuple[str, ...]] = {}
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._holders)

    def shares(self, blocks: Sequence[int]) -> Mapping[str, float]:
        """By replica: the share of these blocks, from the first one on without a gap, that it has served."""
        if not blocks:
            return {}
        found: dict[str, float] = {}
        leading = set(self._holders.get(blocks[0], ()))
        for count, block in enumerate(blocks, start=1):
            leading.intersection_update(self._holders.get(block, ()))
            if not leading:
                break
            for id_ in leading:
                found[id_] = count / len(blocks)
        return found

    def served(self, blocks: Sequence[int], id_: str) -> None:
        """That replica works on this prompt now."""
        # From the end, so that of one prompt the beginning, which others may share, is forgotten last.
        for block in reversed(blocks):
            others = (other for other in self._holders.pop(block, ()) if other != id_)
            self._holders[block] = (id_, *others)[:_MAX_HOLDERS]
        while len(self._holders) > self._max_entries:
            del self._holders[next(iter(self._holders))]
