"""The names under which full blocks are found again: digests chained from the start of the sequence.

A block's digest covers its own tokens, all tokens before it, and what else decides its content: the adapter, and a
tenant's salt, which keeps tenants from telling by a fast answer what others have asked. BLAKE2b with 128 bits: nobody
can craft two prompts of one digest, which Python's own hash would allow.
"""

from hashlib import blake2b
from struct import Struct

DIGEST_BYTES = 16


def root_digest(*, adapter_id: int | None, cache_salt: str | None) -> bytes:
    """Where a chain begins."""
    return blake2b(repr((adapter_id, cache_salt)).encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(digests: list[bytes], token_ids: list[int], *, root: bytes, block_size: int, upto: int) -> None:
    """Append to ``digests``, one a block, until there are ``upto`` of them."""
    pack = Struct(f"{block_size}I").pack
    parent = digests[-1] if digests else root
    for start in range(len(digests) * block_size, upto * block_size, block_size):
        parent = blake2b(parent + pack(*token_ids[start : start + block_size]), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
