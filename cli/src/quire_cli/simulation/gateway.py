"""The gateway: it sends each request to a ready replica, by what it knows of them, which is a scrape a second old.

Under ``simulate``. Where no replica is ready, it holds requests until one is or their time is up.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row

from quire_cli.simulation.balance import Candidate, Load, pick
from quire_cli.simulation.engine import Engine
from quire_cli.simulation.run import Outcome
from quire_cli.simulation.sequence import Sequence

SCRAPE_SECONDS = 1.0
_RATE_SECONDS = 10.0
_LEAST_TOKENS = 256
_HALF_LIFE_SECONDS = 10.0
_MAX_ENTRIES = 32_768
_MAX_HOLDERS = 4


class Gateway:
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
        """When the last scrape that is due by then takes place, where none has since."""
        return now - now % SCRAPE_SECONDS if now >= self._next_scrape else None

    def scrape(self, now: float) -> None:
        """Ask every replica, all advanced to ``now``, how it stands."""
        self._next_scrape = now - now % SCRAPE_SECONDS + SCRAPE_SECONDS
        for backend in self._backends.values():
            backend.scrape(now)

    def discover(self, ready: Iterable[Engine], now: float) -> None:
        """These take requests now, and no others; who was held for one goes there."""
        known = self._backends
        self._backends = {engine.name: known.get(engine.name) or Backend(engine, now) for engine in ready}
        self._capacities = {
            name: backend.engine.kv.num_blocks * backend.engine.kv.block_size
            for name, backend in self._backends.items()
        }
        while self.held and self._backends:
            self.send(self.held.popleft(), now)

    def send(self, sequence: Sequence, now: float) -> None:
        """A request arrives, at a fleet advanced to ``now``. One that every replica turns away fails."""
        if not self._backends:
            self.held.append(sequence)
            return
        shares = self._prefixes.shares(sequence.prefix, self._capacities) if len(self._backends) > 1 else {}
        names = list(self._backends)
        while names:
            name = self._choose(names, sequence.prompt_tokens, shares)
            backend = self._backends[name]
            if not backend.engine.is_full_for(sequence):
                self._prefixes.sent(sequence.prefix, name, sequence.prompt_tokens)
                backend.sent_tokens += sequence.prompt_tokens * (1.0 - shares.get(name, 0.0))
                backend.engine.add(sequence, now)
                return
            names.remove(name)
        sequence.outcome = Outcome.FAILED

    def give_up(self, now: float) -> None:
        """On those that were held too long."""
        while self.held and self.held[0].arrival + self._hold_seconds <= now:
            sequence = self.held.popleft()
            sequence.outcome = Outcome.FAILED

    def _choose(self, names: Row[str], prompt_tokens: int, shares: Mapping[str, float]) -> str:
        if len(names) == 1:
            return names[0]
        candidates = [self._backends[name].candidate(shares.get(name, 0.0)) for name in names]
        return pick(candidates, prompt_tokens, self._rng.random()).name


class Backend:
    """What the gateway knows of one replica."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.sent_tokens = 0.0
        """Since the last scrape."""
        self._finishes = FinishRate()
        self._prefills = PrefillRate()
        self.scrape(now)

    def scrape(self, now: float) -> None:
        engine, gauges = self.engine, self.engine.gauges(now)
        self.sent_tokens = 0.0
        self._load = Load(
            running=gauges.running,
            waiting=gauges.waiting,
            max_running=engine.max_sequences,
            kv_usage=gauges.kv_blocks / engine.kv.num_blocks,
            finished_per_second=self._finishes.add(engine.num_finished, now),
            in_flight=engine.num_unfinished,
            pending_tokens=engine.pending_prefill_tokens(),
            prefill_tokens_per_second=self._prefills.add(engine.computed_prompt_tokens, engine.busy_seconds(now)),
        )

    def candidate(self, prefix_share: float) -> Candidate:
        return Candidate(self.engine.name, self._load, self.engine.num_unfinished, self.sent_tokens, prefix_share)


class FinishRate:
    """Requests that one replica finishes per second, over the last ``_RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, finished: int, now: float) -> float | None:
        """With one more reading; None before a second one, or when nothing finished."""
        points = self._points
        points.append((now, finished))
        while len(points) > 2 and points[0][0] < now - _RATE_SECONDS:
            points.popleft()
        start, first = points[0]
        return (finished - first) / (now - start) if now > start and finished > first else None


class PrefillRate:
    """Prompt tokens that one replica computes per second of steps, where it computes any to speak of."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._tokens = self._weighted = 0.0

    def add(self, computed: float, busy_seconds: float) -> float | None:
        """With one more reading of both counters; None while nothing was learnt."""
        tokens, took = (0.0, 0.0) if self._last is None else (computed - self._last[0], busy_seconds - self._last[1])
        self._last = computed, busy_seconds
        if tokens >= _LEAST_TOKENS and took > 0:
            fade = 0.5 ** (took / _HALF_LIFE_SECONDS)
            self._tokens = self._tokens * fade + tokens
            self._weighted = self._weighted * fade + tokens * (tokens / took)
        return self._weighted / self._tokens if self._tokens else None


class PrefixIndex:
    """Which replicas were sent a prefix block last; forgotten is what they can't hold any more, or was used least."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[tuple[str, float], ...]] = OrderedDict()
        """Each with the tokens that it had been sent in all by then."""
        self._sent: dict[str, float] = {}

    def shares(self, blocks: Row[int], capacities: Mapping[str, float]) -> dict[str, float]:
        """By replica: the share of these blocks, from the first one on without a gap."""
        found: dict[str, float] = {}
        leading = set(capacities)
        last: tuple[tuple[str, float], ...] | None = None
        for count, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            # Most blocks were sent along with the one before, and have the same holders.
            if holders != last:
                last = holders
                holding = {
                    name for name, at in holders if name in leading and self._sent[name] - at <= capacities[name]
                }
                if count:
                    found.update(dict.fromkeys(leading - holding, count / len(blocks)))
                leading = holding
                if not leading:
                    break
        if blocks:
            found.update(dict.fromkeys(leading, 1.0))
        return found

    def sent(self, blocks: Row[int], name: str, tokens: float) -> None:
        """That replica works on this prompt now."""
        holder = name, self._sent.get(name, 0.0) + tokens
        self._sent[name] = holder[1]
        for block in reversed(blocks):
            others = [other for other in self._holders.pop(block, ()) if other[0] != name]
            self._holders[block] = (holder, *others)[:_MAX_HOLDERS]
        while len(self._holders) > _MAX_ENTRIES:
            self._holders.popitem(last=False)
