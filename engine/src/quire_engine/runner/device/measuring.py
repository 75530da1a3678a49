"""The comparison of two ways to compute the same on a device: their times as captured graphs, and their results."""

from collections.abc import Callable

from torch import Tensor

from quire_engine.runner.device.accelerator import Accelerator

REPLAYS = 5
LARGEST_ERROR = 0.02
"""The largest error of 16-bit results that were rounded in other places; see ``largest_error``."""


def least_microseconds(accelerator: Accelerator, work: Callable[[], None]) -> float:
    """Return the least microseconds over several replays of a graph of ``work``."""
    graph = accelerator.capture(work)
    taken = []
    for _ in range(REPLAYS):
        began = accelerator.mark()
        graph.replay()
        ended = accelerator.mark()
        ended.wait()
        taken.append(ended.seconds_since(began))
    return min(taken) * 1e6


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest ||found - expected|| / ||expected|| over rows of the last dimension; NaN stays NaN."""
    wide = expected.float()
    return float(((found.float() - wide).norm(dim=-1) / wide.norm(dim=-1)).max())
