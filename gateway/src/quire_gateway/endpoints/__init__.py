"""Which replicas there are: the discovery port.

A ``Discovery`` publishes whole snapshots, model by model; ``fleet`` keeps the latest. A snapshot may be out of date:
only a request shows whether a replica really answers.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from quire_common.contract.gateway import ModelEndpoints

Snapshot = Mapping[str, ModelEndpoints]
"""The models by name. A model without endpoints has zero replicas; a model that is absent is unknown."""

Publish = Callable[[Snapshot], None]


class Discovery(Protocol):
    """A source of snapshots."""

    @property
    def num_gateways(self) -> int:
        """The number of gateways that serve now; 1 where they are not counted."""

    async def run(self, publish: Publish) -> None:
        """Publish each new snapshot until cancelled. Errors are logged, and the last snapshot stays valid."""
        ...
