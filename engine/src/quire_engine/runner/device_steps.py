"""The part that all runners on a GPU have in common: rows, swapped blocks, and the workspace of attention."""

from dataclasses import dataclass

import torch

from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.model.family import CausalLM
from quire_engine.runner.device.accelerator import Accelerator, make_accelerator
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.inputs import DeviceRows
from quire_engine.runner.device.passes import DevicePasses, PassSizes
from quire_engine.runner.device.swap import DeviceSwapper
from quire_engine.runner.inputs import table_blocks
from quire_engine.runner.kv_cache import allocate_swap_space
from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention.plan import allocate_workspace, fixed_split_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """The things that a runner on a GPU is made of."""

    model: CausalLM
    caches: tuple[KVCache, ...]
    """They have one block more than the layout says, for padding."""
    layout: KVCacheLayout
    num_heads: int
    """The query heads of the widest layer."""
    max_rows: int
    max_tokens: int
    max_model_len: int
    most_drafts: int = 0
    """The most drafts that a step verifies."""
    in_flight: int = 2
    """The most steps that are issued and not done."""
    device: torch.device
    deterministic: bool = False
    accelerator: Accelerator | None = None
    """None is that of the device."""

    @property
    def most_draws(self) -> int:
        return self.max_rows + self.most_drafts


class DeviceSteps:
    """The state of a runner on a GPU. ``room`` is the number of tokens of its largest pass."""

    def __init__(self, parts: DeviceParts, *, room: int) -> None:
        layout, caches = parts.layout, parts.caches
        for group in layout.groups:
            assert all(caches[layer].num_blocks > group.num_blocks for layer in group.layers), "no spare block"
        self._parts, self._layout = parts, layout
        self._accelerator = make_accelerator(parts.device) if parts.accelerator is None else parts.accelerator
        self._rows = DeviceRows(
            layout=layout,
            max_rows=parts.max_rows,
            max_blocks=table_blocks(layout, parts.max_model_len),
            max_tokens=parts.max_tokens,
            device=parts.device,
        )
        self._swapper = DeviceSwapper(self._accelerator, layout, caches, allocate_swap_space(layout, caches))
        self._workspace = allocate_workspace(
            max_tokens=max(room, parts.max_rows),
            heads=parts.num_heads,
            head_dim=max(cache.head_dim for cache in caches),
            device=caches[0].keys.device,
            split_tokens=fixed_split_tokens(parts.max_model_len) if parts.deterministic else None,
        )

    def _make_passes(
        self, caches: tuple[KVCache, ...], graph_sizes: GraphSizes, *, adapter_slots: int = 0
    ) -> DevicePasses:
        """Return the passes of the model over its ``caches``; see ``PassSizes``."""
        parts = self._parts
        return DevicePasses(
            parts.model,
            caches,
            self._layout,
            self._rows,
            accelerator=self._accelerator,
            workspace=self._workspace,
            sizes=PassSizes(
                rows=parts.max_rows,
                tokens=parts.max_tokens,
                logits=parts.most_draws,
                draws=parts.most_draws,
                adapter_slots=adapter_slots,
            ),
            graph_sizes=graph_sizes,
            in_flight=parts.in_flight,
        )
