"""The last launch of a recorded pass over decoding sequences that goes on by itself, with its own greedy tokens.

Legend: R sequences with one token each, P passes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_kernels.checks import check_dense

if TYPE_CHECKING:
    from quire_kernels.paged_attention.cpu_plan import CpuPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """The inputs of a pass, which ``feed_back`` changes for the next one."""

    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64
    plan: "CpuPlan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The results of some passes, and what is known of them before."""

    done: Tensor  # [1] int64: the passes that were run
    slots: Tensor  # [P, R] int64, of each pass
    sampled: Tensor  # [P, R] int64


def feed_back(sampled: Tensor, inputs: PassInputs, passes: Passes) -> None:
    """Note the tokens [R] int64 that a pass on a CPU sampled, and prepare the inputs of the next one.

    The plan must last for all passes; see ``CpuPlan.lasts``. Raise ArgumentError on other shapes or dtypes.
    """
    # numba takes long to import, and a machine with a GPU may lack it.
    from quire_kernels.feed_back import cpu

    rows, all_passes = tuple(inputs.token_ids.shape), tuple(passes.slots.shape)
    for name, tensor, shape in (
        ("sampled", sampled, rows),
        ("token_ids", inputs.token_ids, rows),
        ("positions", inputs.positions, rows),
        ("slots", inputs.slots, rows),
        ("passes.done", passes.done, (1,)),
        ("passes.slots", passes.slots, (all_passes[0], *rows)),
        ("passes.sampled", passes.sampled, (all_passes[0], *rows)),
    ):
        check_dense("feed_back", name, tensor, torch.int64, shape)
    cpu.feed_back(sampled, inputs, passes)
