"""The simulated gateway: it sends each request to a ready replica, by the routing policy of the real gateway.

Under ``simulate``. It knows what a scrape of each replica showed, at most a second ago. While no replica is ready, it
holds requests until one is or their time is up.
"""

import random
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row

from quire_cli.simulation.engine import Engine
from quire_cli.simulation.run import Outcome
from quire_cli.simulation.sequence import Sequence
from quire_common.contract.gateway import SCRAPE_SECONDS
from quire_common.routing.balance import Candidate, Hold, Load, pick
from quire_common.routing.prefixes import PrefixIndex
from quire_common.routing.speed import PrefillRate, Rate


class Gateway:
    """A gateway in front of simulated engines."""

    def __init__(self, *, seed: int, hold_seconds: float) -> None:
        self.held: deque[Sequence] = deque()
        self._hold_seconds = hold_seconds
        self._rng = random.Random(f"gateway {seed}")
        self._prefixes = PrefixIndex()
        self._backends: dict[str, Backend] = {}
        self._capacities: dict[str, int] = {}
        """Tokens in a replica's KV cache."""
        self._next_scrape = 0.0

    def next_scrape(self, now: float) -> float | None:
        """Return when the last scrape that is due by ``now`` takes place, or None if it has taken place."""
        return now - now % SCRAPE_SECONDS if now >= self._next_scrape else None

    def scrape(self, now: float) -> None:
        """Scrape every replica; all are advanced to ``now``."""
        self._next_scrape = now - now % SCRAPE_SECONDS + SCRAPE_SECONDS
        for backend in self._backends.values():
            backend.scrape(now)

    def discover(self, ready: Iterable[Engine], now: float) -> None:
        """Send requests to these replicas and no others; held requests are sent at once."""
        known = self._backends
        self._backends = {engine.name: known.get(engine.name) or Backend(engine, now) for engine in ready}
        self._capacities = {
            name: backend.engine.kv.num_blocks * backend.engine.kv.block_size
            for name, backend in self._backends.items()
        }
        self._prefixes.forget(known.keys() - self._backends.keys())
        while self.held and self._backends:
            self.send(self.held.popleft(), now)

    def send(self, sequence: Sequence, now: float) -> None:
        """Send a request that arrives now, at replicas advanced to ``now``. It fails if every replica refuses it."""
        if not self._backends:
            self.held.append(sequence)
            return
        shares = self._prefixes.shares(sequence.prefix, self._capacities) if len(self._backends) > 1 else {}
        names = list(self._backends)
        while names:
            name = self._choose(names, sequence.prompt_tokens, shares)
            backend = self._backends[name]
            if not backend.engine.is_full_for(sequence):
                self._prefixes.record(sequence.prefix, name, sequence.prompt_tokens)
                backend.sent_tokens += sequence.prompt_tokens * (1.0 - shares.get(name, 0.0))
                backend.engine.add(sequence, now)
                return
            names.remove(name)
        sequence.outcome = Outcome.FAILED

    def give_up(self, now: float) -> None:
        """Fail the requests that were held too long."""
        while self.held and self.held[0].arrival + self._hold_seconds <= now:
            sequence = self.held.popleft()
            sequence.outcome = Outcome.FAILED

    def _choose(self, names: Row[str], prompt_tokens: int, shares: Mapping[str, float]) -> str:
        if len(names) == 1:
            return names[0]
        candidates = [self._backends[name].candidate(shares.get(name, 0.0)) for name in names]
        choice = pick(candidates, prompt_tokens=prompt_tokens, tie_breaker=self._rng.random())
        assert not isinstance(choice, Hold)
        return choice.id


class Backend:
    """The gateway's knowledge of one replica."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.sent_tokens = 0.0
        """Uncached prompt tokens sent since the last scrape."""
        self._finishes = Rate()
        self._prefills = PrefillRate()
        self.scrape(now)

    def scrape(self, now: float) -> None:
        """Read the engine's load."""
        engine, gauges = self.engine, self.engine.gauges(now)
        self.sent_tokens = 0.0
        self._load = Load(
            running=gauges.running,
            waiting=gauges.waiting,
            max_running=engine.max_sequences,
            kv_usage=gauges.kv_blocks / engine.kv.num_blocks,
            finished_per_second=self._finishes.update(engine.num_finished, now),
            in_flight=engine.num_unfinished,
            pending_tokens=engine.pending_prefill_tokens(),
            prefill_tokens_per_second=self._prefills.update(engine.computed_prompt_tokens, engine.busy_seconds(now)),
        )

    def candidate(self, prefix_share: float) -> Candidate:
        """Return the replica as the routing policy sees it."""
        return Candidate(self.engine.name, self._load, self.engine.num_unfinished, self.sent_tokens, prefix_share)
