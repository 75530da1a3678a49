"""Which replicas there are: the discovery port.

A ``Discovery`` publishes whole snapshots, model by model; ``fleet`` keeps the latest. What it learns of may be late:
whether a replica really answers is found out by asking it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One replica's address, and what the cluster says of it (the words of EndpointSlice conditions)."""

    id: str
    url: str
    """Scheme, host and port; no path."""
    ready: bool
    serving: bool
    """Answers, though it may be terminating."""
    terminating: bool


Snapshot = Mapping[str, tuple[Endpoint, ...]]
"""Endpoints by model; a model with none is at zero replicas, one that is not there is unknown."""

Publish = Callable[[Snapshot], None]


class Discovery(Protocol):
    async def run(self, publish: Publish) -> None:
        """Publish each new snapshot until cancelled. Errors are logged and outlived: the last snapshot stands."""
        ...
