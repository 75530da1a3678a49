"""Low-rank adapters in plain torch, one token and one part at a time: the reference for every implementation."""

from torch import Tensor

from quire_kernels.lora import LayerSlots, TokenGroups


def add_adapters(y: Tensor, x: Tensor, layer: LayerSlots, groups: TokenGroups) -> None:
    largest = layer.b.shape[1]
    ends = layer.ends.tolist()
    for slot, first, end in groups.blocks.tolist():
        for token in groups.order[first:end].tolist() if slot >= 0 else ():
            begin = 0
            for part, stop in enumerate(ends):
                rank = int(layer.ranks[slot, part])
                a = layer.a[slot, part * largest : part * largest + rank].double()  # [r, K]
                b = layer.b[slot, :rank, begin:stop].double()  # [r, n]
                added = b.t() @ (a @ x[token].double())
                y[token, begin:stop] = (y[token, begin:stop].double() + added).to(y.dtype)
                begin = stop
