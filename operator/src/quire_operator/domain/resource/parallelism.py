"""``spec.parallelism``: the ranks over which each replica spreads its model, and the pods in which they run."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from quire_operator.domain.resource.field_kinds import Integer
from quire_operator.domain.resource.schema import Rule

MAX_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Ranks are processes, each of which has a share of the model. A replica with several nodes is a group of pods."""

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
    pipeline: Annotated[
        int,
        Integer(
            "Number of stages among which the layers are divided (pipeline parallelism), which must divide the number "
            "of layers. Each stage has `tensor` ranks.",
            minimum=1,
            maximum=MAX_SIZE,
            flags=("pipeline-parallel-size",),
        ),
    ] = 1
    nodes: Annotated[
        int,
        Integer(
            "Number of pods of each replica, which must divide tensor × pipeline. Each pod has its share of the ranks, "
            "and spec.resources are those of one pod, GPUs included. With 2 or more, a replica is a group of pods, "
            "which are on different nodes where that is possible, and the cluster needs LeaderWorkerSet "
            "(leaderworkerset.x-k8s.io). Cannot change between 1 and more.",
            minimum=1,
            maximum=MAX_SIZE,
            flags=(
                "nnodes",
                "node-rank",
                "master-addr",
                "master-port",
                "group-secret-file",
                "distributed-timeout-seconds",
            ),
        ),
    ] = 1

    RULES: ClassVar = (
        Rule(
            at="nodes",
            cel="((has(self.tensor) ? self.tensor : 1) * (has(self.pipeline) ? self.pipeline : 1)) "
            "% (has(self.nodes) ? self.nodes : 1) == 0",
            holds=lambda shape, document: shape.ranks % shape.nodes == 0,
            message="must divide tensor × pipeline, because each pod has as many ranks as the others",
        ),
    )

    @property
    def ranks(self) -> int:
        """The number of processes of a replica."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int:
        """The number of processes of one pod."""
        return self.ranks // self.nodes

    @property
    def is_group(self) -> bool:
        """True if a replica is a group of pods."""
        return self.nodes > 1
