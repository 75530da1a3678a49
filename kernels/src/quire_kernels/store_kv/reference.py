"""store_kv in plain torch: what every implementation is compared with."""

from torch import Tensor

from quire_kernels.kv_cache import KVCache, write_tokens
from quire_kernels.rotary import reference as rotary_reference


def store_kv(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
) -> None:
    rotary_reference.rotary(q, cos_sin, positions)
    keys = k.clone()
    rotary_reference.rotary(keys, cos_sin, positions)
    write_tokens(cache, slots, keys, v)
