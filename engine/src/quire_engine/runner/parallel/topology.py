"""The places of ranks: which node runs a rank, which part of the model it has, and which ranks it exchanges data with.

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

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with which ``rank`` has a stream: its tensor group over several nodes, and other stages.

        Every rank has one with rank 0, through which those on GPUs meet.
        """
        group = () if self.shares_memory(rank) else self.tensor_group(rank)
        stages = (rank - self.tensor, rank + self.tensor)
        meeting = range(self.ranks) if rank == 0 else (0,)
        found = {*group, *meeting, *(other for other in stages if 0 <= other < self.ranks)}
        return tuple(sorted(found - {rank}))

    def links_between(self, node: int, other: int) -> list[tuple[int, int]]:
        """Return the streams between two nodes, each as (rank of ``node``, rank of ``other``)."""
        return [
            (rank, peer) for rank in self.ranks_of(node) for peer in self.peers(rank) if self.node_of(peer) == other
        ]

    def local_links(self, node: int) -> list[tuple[int, int]]:
        """Return the streams within a node, each once."""
        return [(rank, peer) for rank, peer in self.links_between(node, node) if rank < peer]


def topology_of(parallel: ParallelOptions) -> Topology:
    return Topology(tensor=parallel.tensor, stages=parallel.pipeline, nodes=parallel.nodes)
