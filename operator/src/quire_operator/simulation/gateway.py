"""The gateway: it sends each request to a ready replica, by what it knows of them, which is a scrape a second old.

Under ``simulate``. Where no replica is ready, it holds requests until one is or their time is up.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Row

from quire_operator.simulation.balance import Candidate, Load, pick
from quire_operator.simulation.engine import Engine
from quire_operator.simulation.run import Outcome
from quire_operator.simulation.sequence import Sequence

SCRAPE_SECONDS = 1.0
_RATE_SECONDS = 10.0
_MAX_ENTRIES = 32_768
_MAX_HOLDERS = 4


class Gateway:
    def __init__(self, *, seed: int, hold_seconds: float) -> None:
        self.held: deque[Sequence] = deque()
        self._hold_seconds = hold_seconds
        self._rng = random.Random(f"gateway {seed}")
        self._prefixes = PrefixIndex()
        self._backends: dict[str, Backend] = {}
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
        self._backends = {engine.name: known.get(engine.name) or Backend(engine) for engine in ready}
        for name in self._backends.keys() - known.keys():
            self._backends[name].scrape(now)
        while self.held and self._backends:
            self.send(self.held.popleft(), now)

    def send(self, sequence: Sequence, now: float) -> None:
        """A request arrives, at a fleet advanced to ``now``. One that every replica turns away fails."""
        if not self._backends:
            self.held.append(sequence)
            return
        names = list(self._backends)
        while names:
            backend = self._backends[self._choose(names, sequence.prefix)]
            if not backend.engine.is_full_for(sequence):
                self._prefixes.sent(sequence.prefix, backend.engine.name)
                backend.engine.add(sequence, now)
                return
            names.remove(backend.engine.name)
        sequence.outcome = Outcome.FAILED

    def give_up(self, now: float) -> None:
        """On those that were held too long."""
        while self.held and self.held[0].arrival + self._hold_seconds <= now:
            sequence = self.held.popleft()
            sequence.outcome = Outcome.FAILED

    def _choose(self, names: Row[str], prefix: Row[int]) -> str:
        if len(names) == 1:
            return names[0]
        shares = self._prefixes.shares(prefix)
        candidates = [
            Candidate(
                name=name,
                in_flight=self._backends[name].engine.num_unfinished,
                load=self._backends[name].load,
                prefix_share=shares.get(name, 0.0),
            )
            for name in names
        ]
        return pick(candidates, self._rng.random()).name


class Backend:
    """What the gateway knows of one replica."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.load: Load | None = None
        self._rate = FinishRate()

    def scrape(self, now: float) -> None:
        engine, gauges = self.engine, self.engine.gauges(now)
        self.load = Load(
            running=gauges.running,
            waiting=gauges.waiting,
            kv_usage=gauges.kv_blocks / engine.kv.num_blocks,
            finished_per_second=self._rate.add(engine.num_finished, now),
            in_flight=engine.num_unfinished,
        )


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


class PrefixIndex:
    """Which replicas were sent a prefix block last; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def shares(self, blocks: Row[int]) -> dict[str, float]:
        """By replica: the share of these blocks, from the first one on without a gap."""
        found: dict[str, float] = {}
        leading = set(self._holders.get(blocks[0], ())) if blocks else set()
        for count, block in enumerate(blocks, start=1):
            leading.intersection_update(self._holders.get(block, ()))
            if not leading:
                break
            for name in leading:
                found[name] = count / len(blocks)
        return found

    def sent(self, blocks: Row[int], name: str) -> None:
        for block in reversed(blocks):
            others = tuple(other for other in self._holders.pop(block, ()) if other != name)
            self._holders[block] = (name, *others)[:_MAX_HOLDERS]
        while len(self._holders) > _MAX_ENTRIES:
            self._holders.popitem(last=False)
