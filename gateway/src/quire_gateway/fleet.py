"""The replicas of every model as the gateway knows them: discovery's snapshot, joined with what was scraped and seen.

Between ``endpoints`` (who is there) and ``proxy`` (who gets the request). The only mutable state beside the requests
themselves; touched from the event loop alone.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from quire_gateway.balance import Candidate, Hold, Load, pick
from quire_gateway.endpoints import Endpoint, Snapshot
from quire_gateway.learning import TokensPerByte
from quire_gateway.prefixes import PrefixIndex, PrefixIndexes

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
    in_flight_tokens: float = 0.0
    """In the prompts of those requests."""
    sent_tokens: float = 0.0
    """In all prompts so far, but for what it probably had cached."""
    load: Load | None = None
    load_time: float = 0.0
    load_sent_tokens: float = 0.0
    """``sent_tokens`` when it was scraped."""
    kv_tokens: float = math.inf
    """That its KV cache holds; infinite where it does not say."""
    failures: int = 0
    unreachable: bool = False
    suspect_until: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.endpoint.ready and not self.endpoint.terminating

    def is_suspect(self, now: float) -> bool:
        return now < self.suspect_until

    @contextmanager
    def request(self, prompt_tokens: float) -> Iterator[None]:
        """While one of our requests is there."""
        self.in_flight += 1
        self.in_flight_tokens += prompt_tokens
        try:
            yield
        finally:
            self.in_flight -= 1
            self.in_flight_tokens = self.in_flight_tokens - prompt_tokens if self.in_flight else 0.0

    def failed(self, now: float, *, unreachable: bool) -> None:
        """It could not be reached, or took no requests: ask others first for a while, longer each time."""
        self.failures += 1
        self.unreachable = unreachable
        pause = min(_MAX_SUSPECT_SECONDS, _SUSPECT_SECONDS * 2.0 ** min(self.failures - 1, 10))
        self.suspect_until = now + pause

    def answered(self) -> None:
        """It took a request: whatever was held against it is forgotten."""
        self.failures, self.unreachable, self.suspect_until = 0, False, 0.0

    def scraped(self, load: Load, now: float, *, sent_tokens: float, kv_tokens: float) -> None:
        """What it said of itself, having been sent so many tokens when it was asked."""
        self.load, self.load_time, self.load_sent_tokens, self.kv_tokens = load, now, sent_tokens, kv_tokens

    def candidate(self, now: float, *, prefix_share: float) -> Candidate:
        fresh = self.load is not None and now - self.load_time <= _LOAD_SECONDS
        return Candidate(
            id=self.endpoint.id,
            ready=self.is_ready,
            suspect=self.is_suspect(now),
            in_flight=self.in_flight,
            load=self.load if fresh else None,
            sent_tokens=self.sent_tokens - self.load_sent_tokens if fresh else self.in_flight_tokens,
            prefix_share=prefix_share,
        )


class Pool:
    """The replicas of one model."""

    def __init__(self, model: str, *, created: int, prefixes: PrefixIndex | None = None) -> None:
        self.model = model
        self.created = created
        """Unix seconds when the gateway first heard of it."""
        self.backends: dict[str, Backend] = {}
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self.tokens_per_byte = TokensPerByte()
        self.changed = asyncio.Event()
        """Set, and replaced, whenever a held request may find a replica now."""

    def pick(
        self, *, prompt_tokens: float, blocks: Sequence[int] = (), exclude: Collection[str] = ()
    ) -> Backend | Hold:
        """For a prompt of these blocks, which goes there now."""
        now = monotonic()
        capacities = {id_: backend.kv_tokens for id_, backend in self.backends.items()} if blocks else {}
        shares = self.prefixes.shares(blocks, capacities) if len(capacities) > 1 else {}
        candidates = [b.candidate(now, prefix_share=shares.get(id_, 0.0)) for id_, b in self.backends.items()]
        choice = pick(candidates, prompt_tokens=prompt_tokens, exclude=exclude, draw=random.random())
        if isinstance(choice, Hold):
            return choice
        backend = self.backends[choice.id]
        backend.sent_tokens += prompt_tokens * (1.0 - shares.get(choice.id, 0.0))
        # At once: of several that begin alike and come together, the later ones hit what the first computes.
        self.prefixes.served(blocks, choice.id, prompt_tokens)
        return backend

    def prompt_tokens(self, num_bytes: int) -> float:
        """How many tokens a prompt of so many bytes probably has; it counts among those the guess is learnt from."""
        self.tokens_per_byte.sent(num_bytes)
        return num_bytes * self.tokens_per_byte.value

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
        self.prefixes.forget({backend.endpoint.id for backend in gone})
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
        self._prefixes = PrefixIndexes()
        self._synced = asyncio.Event()
        self._on_gone = on_gone

    @property
    def is_synced(self) -> bool:
        """Discovery has published at least once."""
        return self._synced.is_set()

    async def wait_synced(self, *, timeout_seconds: float) -> bool:
        """Whether it has within so long: before that nobody can say which models there are."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._synced.wait()
        except TimeoutError:
            return False
        return True

    def publish(self, snapshot: Snapshot, *, now: int) -> None:
        """A new snapshot from discovery. Models that left are forgotten; their held requests are told so."""
        self._synced.set()
        for name in self.pools.keys() - snapshot.keys():
            pool = self.pools.pop(name)
            self._prefixes.close(pool.prefixes)
            self._forget(pool.update(()))
        for name, endpoints in snapshot.items():
            if name not in self.pools:
                self.pools[name] = Pool(name, created=now, prefixes=self._prefixes.open())
            self._forget(self.pools[name].update(endpoints))

    def backends(self) -> list[Backend]:
        return [backend for pool in self.pools.values() for backend in pool.backends.values()]

    def answers(self, backend: Backend) -> None:
        """It answered a scrape: if it could not be reached before, it can now."""
        if backend.unreachable:
            backend.answered()
            pool = self.pools.get(backend.model)
            if pool is not None:
                pool.wake()

    def learn(self, backend: Backend, *, tokens: float, requests: float) -> None:
        """So many requests came to it since its last scrape, and had so many prompt tokens."""
        pool = self.pools.get(backend.model)
        if pool is not None:
            pool.tokens_per_byte.arrived(tokens, requests)

    def _forget(self, gone: list[Backend]) -> None:
        for backend in gone:
            self._on_gone(backend)
