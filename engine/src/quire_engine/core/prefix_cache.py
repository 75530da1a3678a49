"""The index of full blocks by digests, which are chained from the start of the sequence.

A block's digest covers its own tokens, all tokens before it, the adapter, and the scope of sharing: the tenant, unless
tenants share prefixes, and the salt of the request. An adapter that is loaded again has another number, so it never
finds what the one before it computed. Otherwise a tenant could learn from ``cached_tokens``, or from a fast answer,
what other tenants have requested. BLAKE2b with 128 bits prevents crafted collisions of prompts, which Python's own hash
would allow.

With prefix caching every sequence has digests (``PrefixCache.has_digests``). Without it, only sequences that share a
prompt within their request have them, with a root of their own. ``KVManager`` is the only caller.
"""

from collections.abc import Sequence as Many
from hashlib import blake2b
from struct import Struct

from quire_engine.core.block_pool import KVGroup
from quire_engine.core.options import SharePrefixes
from quire_engine.core.sequence import Sequence

DIGEST_BYTES = 16

"""The prefixes that a request may find: those of its own tenant, or those of all."""


def root_digest(
    *,
    tenant: str | None,
    cache_salt: str | None,
    gateway_tenant: str | None = None,
    adapter: int | None = None,
    family: int | None = None,
    generation: int = 0,
) -> bytes:
    """Return the digest with which a chain starts."""
    scope = (tenant, gateway_tenant, cache_salt, adapter, family, generation)
    return blake2b(repr(scope).encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(digests: list[bytes], token_ids: list[int], *, root: bytes, block_size: int, upto: int) -> None:
    """Append to ``digests``, one per block, until there are ``upto`` of them."""
    pack = Struct(f"{block_size}I").pack
    parent = digests[-1] if digests else root
    for start in range(len(digests) * block_size, upto * block_size, block_size):
        parent = blake2b(parent + pack(*token_ids[start : start + block_size]), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """An index of the blocks of all KV cache groups by their digests.

    If it is not ``enabled``, only the sequences of one request find each other's prompt. ``share`` determines whether
    requests find prefixes of all tenants or only of their own.
    """

    def __init__(self, groups: Many[KVGroup], *, block_size: int, enabled: bool, share: SharePrefixes) -> None:
        self._groups = groups
        self._windowed = tuple(group for group in groups if group.window is not None)
        self._block_size = block_size
        self._enabled = enabled
        self._share = share
        self._generation = 0

    def has_digests(self, sequence: Sequence) -> bool:
        return self._enabled or sequence.family is not None

    def find(self, sequence: Sequence) -> int:
        """Return the number of leading blocks that every group still holds within its window.

        At least one token is left to compute, because the next one is sampled from its logits, and so are all tokens
        whose logits are requested.
        """
        if not self.has_digests(sequence):
            return 0
        most = (sequence.num_tokens - 1) // self._block_size
        if sequence.num_reported < sequence.num_to_report:
            most = min(most, sequence.num_reported // self._block_size)
        hit = 0
        while hit < most and self._is_published(sequence, hit):
            hit += 1
        before = None
        while hit != before:
            before = hit
            for group in self._windowed:
                hit = self._find_window(group, sequence, hit)
        return hit

    def _is_published(self, sequence: Sequence, place: int) -> bool:
        """Return whether all full-attention groups have the block; windowed groups are checked afterwards."""
        self._extend_digests(sequence, place + 1)
        digest = sequence.digests[place]
        return all(group.window is not None or group.pool.find(digest) is not None for group in self._groups)

    def _find_window(self, group: KVGroup, sequence: Sequence, most: int) -> int:
        """Return the longest prefix of at most ``most`` blocks of which the group holds all visible ones."""
        end = most
        for place in range(most - 1, -1, -1):
            if place < group.first_visible(end * self._block_size):
                return end
            if group.pool.find(sequence.digests[place]) is None:
                end = place
        return end

    def find_each(self, sequence: Sequence, group: KVGroup, first: int, count: int) -> list[int | None]:
        """Return, for each of ``count`` blocks from place ``first`` on, a block with the same content, or None.

        The last block may be incomplete.
        """
        full = min(first + count, sequence.num_computed // self._block_size) if self.has_digests(sequence) else 0
        self._extend_digests(sequence, full)
        found = [group.pool.find(digest) for digest in sequence.digests[first:full]]
        return [*found, *[None] * (count - len(found))]

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that are full with the first ``num_tokens`` known tokens."""
        if not self.has_digests(sequence):
            return
        full = min(num_tokens, len(sequence.token_ids), sequence.capacity) // self._block_size
        if full <= sequence.num_published:
            return
        self._extend_digests(sequence, full)
        for index, group in enumerate(self._groups):
            first, table = sequence.first_blocks[index], sequence.block_tables[index]
            for place in range(max(first, sequence.num_published), full):
                group.pool.publish(table[place - first], sequence.digests[place])
        sequence.num_published = full

    def _extend_digests(self, sequence: Sequence, upto: int) -> None:
        if len(sequence.digests) < upto:
            root = b"" if sequence.digests else self._root(sequence)
            extend_chain(sequence.digests, sequence.token_ids, root=root, block_size=self._block_size, upto=upto)

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        return root_digest(
            tenant=request.tenant if self._share == "tenant" else None,
            gateway_tenant=request.gateway_tenant if self._share == "tenant" else None,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            family=None if self._enabled else sequence.family,
            generation=self._generation,
        )

    def forget(self) -> None:
        """Make all prefixes unfindable, including those that running sequences extend.

        Running sequences keep their chains, and new chains have other roots.
        """
        self._generation += 1
        for group in self._groups:
            group.pool.forget()
