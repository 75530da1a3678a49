"""The places of ranks: which node runs a rank, and which part of the model it has.

Ranks count through the tensor group of the first stage, then that of the second, and so on; nodes have consecutive
ranks. This module is arithmetic only.
"""

from dataclasses import dataclass

from quire_engine.config import ParallelOptions
from quire_engine.model.model_part import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    tensor: int
    """The ranks of each stage."""
    stages: int
    nodes: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages

    @property
    def sampler(self) -> int:
        """The rank that has the logits and samples: the first one of the last stage."""
        return self.ranks - self.tensor

    def node_of(self, rank: int) -> int:
        return rank * self.nodes // self.ranks

    def ranks_of(self, node: int) -> range:
        each = self.ranks // self.nodes
        return range(node * each, (node + 1) * each)

    def part(self, rank: int) -> ModelPart:
        return ModelPart(
            tensor_rank=rank % self.tensor,
            tensor_size=self.tensor,
            stage=rank // self.tensor,
            stages=self.stages,
        )

    def tensor_group(self, rank: int) -> range:
        """Return the ranks that share the layers of ``rank``, itself included."""
        first = rank - rank % self.tensor
        return range(first, first + self.tensor)

    def shares_memory(self, rank: int) -> bool:
        """Return whether the tensor group has several ranks, all of them on one node."""
        group = self.tensor_group(rank)
        return len(group) > 1 and self.node_of(group[0]) == self.node_of(group[-1])

    @property
    def steps_group(self) -> list[int]:
        """The ranks between which batches go over gloo: rank 0, and those of other nodes."""
        return [0, *range(self.ranks // self.nodes, self.ranks)]


def topology_of(parallel: ParallelOptions) -> Topology:
    return Topology(tensor=parallel.tensor, stages=parallel.pipeline, nodes=parallel.nodes)
