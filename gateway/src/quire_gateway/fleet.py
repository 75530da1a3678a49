"""The replicas of every model as the gateway knows them: discovery's snapshot, joined with what was scraped and seen.

Between ``endpoints`` (who is there) and ``proxy`` (who gets the request). The only mutable state beside the requests
themselves; touched from the event loop alone.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from quire_gateway.balance import Candidate, Hold, Load, pick
from quire_gateway.endpoints import Endpoint, Snapshot
from quire_gateway.prefixes import PrefixIndex

_LOAD_SECONDS = 5.0
"""An older scrape says nothing of now."""
_SUSPECT_SECONDS = 0.5
_MAX_SUSPECT_SECONDS = 10.0


@dataclass(slots=True)
class Backend:
    """One replica, for as long as discovery knows it."""

    endpoint: Endpoint
    model: str
    in_flight: int = 0
    load: Load | None = None
    load_time: float = 0.0
    failures: int = 0
    unreachable: bool = False
    suspect_until: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.endpoint.ready and not self.endpoint.terminating

    def is_suspect(self, now: float) -> bool:
        return now < self.suspect_until

    @contextmanager
    def request(self) -> Iterator[None]:
        """While one of our requests is there."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def failed(self, now: float, *, unreachable: bool) -> None:
        """It could not be reached, or took no requests: ask others first for a while, longer each time."""
        self.failures += 1
        self.unreachable = unreachable
        pause = min(_MAX_SUSPECT_SECONDS, _SUSPECT_SECONDS * 2.0 ** min(self.failures - 1, 10))
        self.suspect_until = now + pause

    def answered(self) -> None:
        """It took a request: whatever was held against it is forgotten."""
        self.failures, self.unreachable, self.suspect_until = 0, False, 0.0

    def candidate(self, now: float, *, prefix_share: float) -> Candidate:
        fresh = self.load is not None and now - self.load_time <= _LOAD_SECONDS
        return Candidate(
            id=self.endpoint.id,
            ready=self.is_ready,
            suspect=self.is_suspect(now),
            in_flight=self.in_flight,
            load=self.load if fresh else None,
            prefix_share=prefix_share,
        )


class Pool:
    """The replicas of one model."""

    def __init__(self, model: str, *, created: int) -> None:
        self.model = model
        self.created = created
        """Unix seconds when the gateway first heard of it."""
        self.backends: dict[str, Backend] = {}
        self.prefixes = PrefixIndex()
        self.changed = asyncio.Event()
        """Set, and replaced, whenever a held request may find a replica now."""

    def pick(self, *, blocks: Sequence[int] = (), exclude: Collection[str] = ()) -> Backend | Hold:
        """For a prompt of these blocks."""
        now = monotonic()
        shares = self.prefixes.shares(blocks) if len(self.backends) > 1 else {}
        candidates = [b.candidate(now, prefix_share=shares.get(id_, 0.0)) for id_, b in self.backends.items()]
        choice = pick(candidates, exclude=exclude, draw=random.random())
        return choice if isinstance(choice, Hold) else self.backends[choice.id]

    def update(self, endpoints: tuple[Endpoint, ...]) -> list[Backend]:
        """Take discovery's word; returns the backends that are gone."""
        fresh: dict[str, Backend] = {}
        for endpoint in endpoints:
            known = self.backends.get(endpoint.id)
            if known is not None and known.endpoint.url == endpoint.url:
                known.endpoint = endpoint
                fresh[endpoint.id] = known
            else:
                fresh[endpoint.id] = Backend(endpoint=endpoint, model=self.model)
        gone = [backend for id_, backend in self.backends.items() if fresh.get(id_) is not backend]
        self.backends = fresh
        self.wake()
        return gone

    def wake(self) -> None:
        """Let held requests look again."""
        self.changed.set()
        self.changed = asyncio.Event()


class Fleet:
    """All models."""

    def __init__(self, *, on_gone: Callable[[Backend], None] = lambda backend: None) -> None:
        self.pools: dict[str, Pool] = {}
        self.is_synced = False
        """Discovery has published at least once."""
        self._on_gone = on_gone

    def publish(self, snapshot: Snapshot, *, now: int) -> None:
        """A new snapshot from discovery. Models that left are forgotten; their held requests are told so."""
        self.is_synced = True
        for name in self.pools.keys() - snapshot.keys():
            pool = self.pools.pop(name)
            self._forget(pool.update(()))
        for name, endpoints in snapshot.items():
            pool = self.pools.get(name) or self.pools.setdefault(name, Pool(name, created=now))
            self._forget(pool.update(endpoints))

    def backends(self) -> list[Backend]:
        return [backend for pool in self.pools.values() for backend in pool.backends.values()]

    def answers(self, backend: Backend) -> None:
        """It answered a scrape: if it could not be reached before, it can now."""
        if backend.unreachable:
            backend.answered()
            pool = self.pools.get(backend.model)
            if pool is not None:
                pool.wake()

    def _forget(self, gone: list[Backend]) -> None:
        for backend in gone:
            self._on_gone(backend)
