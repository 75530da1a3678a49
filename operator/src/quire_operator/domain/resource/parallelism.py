"""``spec.parallelism``: the ranks over which each replica spreads its model."""

from dataclasses import dataclass
from typing import Annotated

from quire_operator.domain.resource.field_kinds import Integer

MAX_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Ranks are processes of one pod, each of which has a share of the model."""

    tensor: Annotated[
        int,
        Integer(
            "Number of ranks that share each layer (tensor parallelism). It must divide the model's attention heads "
            "and the intermediate sizes of its feed-forward layers, and divide its KV heads or be a multiple of them.",
            minimum=1,
            maximum=MAX_SIZE,
            flags=("tensor-parallel-size",),
        ),
    ] = 1
