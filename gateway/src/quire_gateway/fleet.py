"""The replicas of every model as the gateway knows them: discovery's snapshot, joined with scrapes and answers.

Between ``endpoints`` (which replicas exist) and ``proxy`` (which replica gets a request). This is the only mutable
state apart from the requests themselves; only the event loop touches it.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from quire_common.contract.adapters_file import AdapterState
from quire_common.contract.gateway import CANARY, SCRAPE_SECONDS, STABLE, CanaryRoute, Endpoint, HoldPolicy
from quire_common.routing import Candidate, Hold, Load, PrefixIndex, PrefixIndexes, pick
from quire_gateway.canary import WARM_UP_SECONDS, TrackedAttempt, Tracks
from quire_gateway.endpoints import Snapshot
from quire_gateway.prompt import TokensPerByte

_MAX_LOAD_AGE_SECONDS = 5.0
_SILENT_SECONDS = 2 * SCRAPE_SECONDS
"""A replica that answers no scrape for this long is asked only if no other one can be."""
_SUSPECT_SECONDS = 0.5
_MAX_SUSPECT_SECONDS = 10.0
_TYPICAL_RUNNING = 16
"""The requests that a replica runs at once if it does not report its limit."""
_LOAD_SECONDS = {
    AdapterState.LOADED: 0.0,
    AdapterState.READY: 0.1,
    AdapterState.DOWNLOADING: 2.0,
    AdapterState.KNOWN: 5.0,
    AdapterState.FAILED: 60.0,
}
"""About how long an adapter in this state takes until it is in a slot. One that failed may work on other replicas."""


@dataclass(slots=True)
class Backend:
    """One replica, as long as discovery knows it."""

    endpoint: Endpoint
    model: str
    in_flight: int = 0
    in_flight_tokens: float = 0.0
    """The prompt tokens of the requests in flight."""
    sent_tokens: float = 0.0
    """The prompt tokens sent so far, without those that the replica probably had cached."""
    load: Load | None = None
    load_time: float = 0.0
    load_sent_tokens: float = 0.0
    """``sent_tokens`` at the time of the scrape."""
    kv_tokens: float = math.inf
    """The tokens that its KV cache holds; infinite where the replica does not report them."""
    max_model_len: int | None = None
    """The most tokens of a prompt with its answer; None where the replica does not report them."""
    failures: int = 0
    unreachable: bool = False
    suspect_until: float = 0.0
    ready_since: float | None = None
    """When it became ready; None while it is not."""
    asked_since: float | None = None
    """When the first scrape started that it has not answered; None if it has answered the last one."""
    adapters: dict[str, AdapterState] = field(default_factory=dict)
    """The states of its adapters, by their names in requests."""

    @property
    def is_ready(self) -> bool:
        """True if discovery lists it as ready and not terminating."""
        return self.endpoint.ready and not self.endpoint.terminating

    def is_suspect(self, now: float) -> bool:
        """Return whether it failed so recently that other replicas are asked first."""
        return now < self.suspect_until

    def is_silent(self, now: float) -> bool:
        """Return whether it has not answered its last scrapes. Its process may hang, or its machine may be gone."""
        return self.asked_since is not None and now - self.asked_since >= _SILENT_SECONDS

    @contextmanager
    def request(self, prompt_tokens: float) -> Iterator[None]:
        """Count a request as in flight while the context lasts."""
        self.in_flight += 1
        self.in_flight_tokens += prompt_tokens
        try:
            yield
        finally:
            self.in_flight -= 1
            self.in_flight_tokens = self.in_flight_tokens - prompt_tokens if self.in_flight else 0.0

    def record_failure(self, now: float, *, unreachable: bool) -> None:
        """Record that it could not be reached or refused requests: it is suspect for a while, longer each time."""
        self.failures += 1
        self.unreachable = unreachable
        pause = min(_MAX_SUSPECT_SECONDS, _SUSPECT_SECONDS * 2.0 ** min(self.failures - 1, 10))
        self.suspect_until = now + pause

    def record_answer(self) -> None:
        """Record that it accepted a request: earlier failures no longer count."""
        self.failures, self.unreachable, self.suspect_until = 0, False, 0.0

    def note_ready(self, now: float) -> None:
        """Record since when it is ready."""
        if not self.is_ready:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = now

    def room(self, now: float) -> int:
        """Return how many more requests it can run at once; 0 while it is not ready or suspect."""
        if not self.is_ready or self.is_suspect(now):
            return 0
        if self.load is None:
            return max(0, _TYPICAL_RUNNING - self.in_flight)
        limit = _TYPICAL_RUNNING if self.load.max_running is None else self.load.max_running
        requests = self.load.requests + max(0, self.in_flight - self.load.in_flight)
        return max(0, int(limit - max(requests, self.in_flight)))

    def record_wanted(self, adapter: str) -> None:
        """Record that a request makes it load an adapter, so that the next ones go there too."""
        if self.adapters.get(adapter, AdapterState.KNOWN) is AdapterState.KNOWN:
            self.adapters[adapter] = AdapterState.DOWNLOADING

    def candidate(self, now: float, *, prefix_share: float, adapter: str | None = None) -> Candidate:
        """Return this replica as the routing policy sees it."""
        is_recent = self.load is not None and now - self.load_time <= _MAX_LOAD_AGE_SECONDS
        return Candidate(
            id=self.endpoint.id,
            load=self.load if is_recent else None,
            in_flight=self.in_flight,
            sent_tokens=self.sent_tokens - self.load_sent_tokens if is_recent else self.in_flight_tokens,
            prefix_share=prefix_share,
            ready=self.is_ready,
            suspect=self.is_suspect(now) or self.is_silent(now),
            # An adapter that it does not report is downloaded first.
            load_seconds=0.0 if adapter is None else _LOAD_SECONDS[self.adapters.get(adapter, AdapterState.KNOWN)],
        )


class Pool:
    """The replicas of one model, or of an adapter of a model."""

    def __init__(
        self,
        model: str,
        *,
        created: int,
        prefixes: PrefixIndex | None = None,
        on_wake: "Callable[[Pool], None]" = lambda pool: None,
        make_backend: "Callable[[Endpoint, str], Backend] | None" = None,
    ) -> None:
        """``make_backend`` returns the replica at an endpoint; None: each pool has its own."""
        self.model = model
        self.adapter_of: str | None = None
        """For an adapter: the model whose replicas serve it; "" if that model has no pool. None for a model."""
        self.service = ""
        """The Service of its replicas in a cluster, as NAMESPACE/NAME; empty without one."""
        self._make_backend = make_backend or (lambda endpoint, model: Backend(endpoint=endpoint, model=model))
        self.hold = HoldPolicy()
        self._on_wake = on_wake
        self.created = created
        """Unix seconds at which the gateway first saw the model."""
        self.backends: dict[str, Backend] = {}
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self.tokens_per_byte = TokensPerByte()
        self.tracks: Tracks | None = None
        """The tracks of a model with a canary."""

    @property
    def audience(self) -> str:
        """The engines that know a tenant by one value: those of an LLMDeployment, which also serve its adapters."""
        return self.service or self.adapter_of or self.model

    def route(self, canary: CanaryRoute | None) -> None:
        """Apply the route of the model's canary; None without one."""
        if canary is None:
            self.tracks = None
        elif self.tracks is None:
            self.tracks = Tracks(canary)
        else:
            self.tracks.update(canary)

    def choose_track(self, session: str | None) -> str:
        return STABLE if self.tracks is None else self.tracks.choose(session)

    def tracked(self, backend: Backend) -> TrackedAttempt | None:
        """Return the measurement of an attempt that starts now; None while the model has no canary."""
        if self.tracks is None:
            return None
        now = monotonic()
        ready = [each for each in self.backends.values() if each.is_ready]
        canary = sum(each.endpoint.track == CANARY for each in ready)
        is_equal = self.tracks.is_equal_load(stable=len(ready) - canary, canary=canary)
        is_warm = all(each.ready_since is not None and now - each.ready_since >= WARM_UP_SECONDS for each in ready)
        return TrackedAttempt(
            self.tracks.figures[backend.endpoint.track], is_warm=is_warm, is_compared=is_equal and is_warm, now=now
        )

    def pick(
        self,
        *,
        prompt_tokens: float,
        blocks: Sequence[int] = (),
        exclude: Collection[str] = (),
        track: str = STABLE,
    ) -> Backend | Hold:
        """Return the replica for a prompt of these blocks, which is then sent there.

        Replicas of the other track are asked only if the track has none that may be.
        """
        now = monotonic()
        capacities = {id_: backend.kv_tokens for id_, backend in self.backends.items()} if blocks else {}
        shares = self.prefixes.shares(blocks, capacities) if len(capacities) > 1 else {}
        able = {id_: b for id_, b in self.backends.items() if b.is_ready and id_ not in exclude}
        on_track = {id_: b for id_, b in able.items() if b.endpoint.track == track} or able
        adapter = None if self.adapter_of is None else self.model
        candidates = [
            b.candidate(now, prefix_share=shares.get(id_, 0.0), adapter=adapter) for id_, b in on_track.items()
        ]
        choice = pick(candidates, prompt_tokens=prompt_tokens, tie_breaker=random.random())
        if isinstance(choice, Hold):
            return choice
        backend = self.backends[choice.id]
        self.record_sent(backend, prompt_tokens=prompt_tokens, blocks=blocks, share=shares.get(choice.id, 0.0))
        return backend

    def record_sent(
        self, backend: Backend, *, prompt_tokens: float, blocks: Sequence[int] = (), share: float = 0.0
    ) -> None:
        """Record that a prompt is sent to a replica, which has ``share`` of it in its prefix cache."""
        backend.sent_tokens += prompt_tokens * (1.0 - share)
        if self.adapter_of is not None:
            backend.record_wanted(self.model)
        # Recorded at once: when similar prompts come together, the later ones hit what the first one computes.
        self.prefixes.record(blocks, backend.endpoint.id, prompt_tokens)

    def prompt_tokens(self, num_bytes: int) -> float:
        """Return the probable number of tokens of a prompt of this length, and record its length."""
        self.tokens_per_byte.record_bytes(num_bytes)
        return num_bytes * self.tokens_per_byte.value

    def update(self, endpoints: Sequence[Endpoint]) -> list[Backend]:
        """Apply a snapshot from discovery; return the backends that are gone."""
        fresh: dict[str, Backend] = {}
        now = monotonic()
        for endpoint in endpoints:
            known = self.backends.get(endpoint.id)
            if known is not None and known.endpoint.url == endpoint.url:
                known.endpoint = endpoint
                fresh[endpoint.id] = known
            else:
                fresh[endpoint.id] = self._make_backend(endpoint, self.model)
            fresh[endpoint.id].note_ready(now)
        gone = [backend for id_, backend in self.backends.items() if fresh.get(id_) is not backend]
        self.backends = fresh
        self.prefixes.forget({backend.endpoint.id for backend in gone})
        self.wake()
        return gone

    def wake(self) -> None:
        self._on_wake(self)

    def has_trusted(self, now: float) -> bool:
        """Return whether a ready replica has not failed recently."""
        return any(b.is_ready and not b.is_suspect(now) for b in self.backends.values())

    def awaits_start(self, now: float) -> bool:
        """Return whether no ready replica can be trusted and one is known to be starting."""
        return any(b.endpoint.starting for b in self.backends.values()) and not self.has_trusted(now)

    def is_leaving(self, backend: Backend, now: float) -> bool:
        """Return whether a replica terminates or is gone, and another one is ready and did not fail recently."""
        known = self.backends.get(backend.endpoint.id)
        return (known is not backend or backend.endpoint.terminating) and self.has_trusted(now)

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt with its answer that every replica accepts; None where none reports them."""
        return min((b.max_model_len for b in self.backends.values() if b.max_model_len is not None), default=None)

    def ready_ids(self) -> list[str]:
        return [id_ for id_, backend in self.backends.items() if backend.is_ready]

    def room(self, now: float) -> int:
        return sum(backend.room(now) for backend in self.backends.values())


class Fleet:
    """The replicas of all models."""

    def __init__(
        self,
        *,
        on_gone: Callable[[Backend], None] = lambda backend: None,
        on_wake: Callable[[Pool], None] = lambda pool: None,
    ) -> None:
        self.pools: dict[str, Pool] = {}
        self._shared: dict[tuple[str, str], Backend] = {}
        """The replicas by id and URL: a model and its adapters have the same ones."""
        self._prefixes = PrefixIndexes()
        self._synced = asyncio.Event()
        self._on_gone, self._on_wake = on_gone, on_wake

    @property
    def is_synced(self) -> bool:
        """True if discovery has published at least once."""
        return self._synced.is_set()

    async def wait_synced(self, *, timeout_seconds: float) -> bool:
        """Wait for the first snapshot, before which no model is known; return whether it came in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._synced.wait()
        except TimeoutError:
            return False
        return True

    def publish(self, snapshot: Snapshot, *, now: int) -> None:
        """Apply a new snapshot. Models that left are dropped, which wakes their held requests."""
        self._synced.set()
        for name in self.pools.keys() - snapshot.keys():
            pool = self.pools.pop(name)
            self._prefixes.close(pool.prefixes)
            pool.update(())
        # Models come before their adapters, so that a replica belongs to its model.
        for name, model in sorted(snapshot.items(), key=lambda item: item[1].adapter_of is not None):
            if name not in self.pools:
                prefixes = self._prefixes.open()
                self.pools[name] = Pool(
                    name, created=now, prefixes=prefixes, on_wake=self._on_wake, make_backend=self._backend
                )
            pool = self.pools[name]
            pool.hold, pool.adapter_of, pool.service = model.hold, model.adapter_of, model.service
            pool.route(model.canary)
            if model.adapter_of:
                pool.tokens_per_byte = self.pools[model.adapter_of].tokens_per_byte
            pool.update(model.endpoints)
        self._report_gone()

    def _backend(self, endpoint: Endpoint, model: str) -> Backend:
        """Return the replica at an endpoint, which the pools of adapters share with the one of their model."""
        found = self._shared.get((endpoint.id, endpoint.url))
        if found is None:
            found = self._shared[endpoint.id, endpoint.url] = Backend(endpoint=endpoint, model=model)
        found.endpoint = endpoint
        return found

    def backends(self) -> list[Backend]:
        return list(self._shared.values())

    def serves_adapters(self, backend: Backend) -> bool:
        return any(
            pool.adapter_of is not None and pool.backends.get(backend.endpoint.id) is backend
            for pool in self.pools.values()
        )

    def record_reachable(self, backend: Backend) -> None:
        """Record that a replica answered a scrape: it is no longer unreachable, and may have room for held requests."""
        if backend.unreachable:
            backend.record_answer()
        for pool in self.pools.values():
            if pool.backends.get(backend.endpoint.id) is backend:
                pool.wake()

    def record_arrivals(self, backend: Backend, *, tokens: float, requests: float) -> None:
        """Record the requests, and their prompt tokens, that reached a replica since its last scrape."""
        pool = self.pools.get(backend.model)
        if pool is not None:
            pool.tokens_per_byte.record_tokens(tokens, requests)

    def _report_gone(self) -> None:
        """Forget the replicas that no pool has any more."""
        kept = {id(backend) for pool in self.pools.values() for backend in pool.backends.values()}
        for place, backend in list(self._shared.items()):
            if id(backend) not in kept:
                del self._shared[place]
                self._on_gone(backend)
