"""One engine: a queue, a batch that takes steps, and the counters that a scrape shows.

Under ``fleet``. As in the real scheduler, each decoding sequence samples a token per step, the rest of the token budget
goes to prompts in their order, and the first of the queue is admitted as long as it fits as a whole. If blocks run out,
the last in order is preempted and recomputed. While the batch cannot change, because all decode and no sequence can be
admitted, any number of steps is one event (a stretch).
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from quire_cli.simulation.counters import Counters
from quire_cli.simulation.decoding import Decoding
from quire_cli.simulation.kv import KVCache
from quire_cli.simulation.run import Outcome
from quire_cli.simulation.scenario import EngineModel
from quire_cli.simulation.sequence import Sequence
from quire_cli.simulation.steps import StallBound, Stretch
from quire_operator.domain.autoscaling.observation import ReplicaSample

_HEADROOM = 0.01
"""The share of blocks that admission leaves free, so that the next decode steps do not preempt a new sequence."""

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Gauges:
    """The gauges at the end of the last step: a scrape shows neither the current step nor later arrivals."""

    waiting: int = 0
    running: int = 0
    queued_tokens: int = 0
    kv_blocks: int = 0
    prefilling_tokens: int = 0
    """Prompt tokens that running sequences still have to compute."""


class Engine:
    def __init__(self, model: EngineModel, *, name: str, prefix_block_tokens: int, now: float = 0.0) -> None:
        self.name = name
        self.kv = KVCache(
            num_blocks=model.kv_tokens // model.block_size,
            block_size=model.block_size,
            prefix_block_tokens=prefix_block_tokens,
            prefix_caching=model.prefix_caching,
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order: the last is the first to be preempted."""
        self.end = inf
        """When the step or stretch under way ends; infinite between two."""
        self._model = model
        self._clock = now
        """When the next step begins, where there is anything to do."""
        self._factor = 1.0
        self._headroom = int(self.kv.num_blocks * _HEADROOM)
        self._stall_bound = StallBound(model)
        self._queued_tokens = 0
        self._counters = Counters()
        self._told = Gauges()
        self._queue = (0, 0)
        """Sequences and tokens that waited when the step under way began."""
        self._received = self._received_at_begin = self._received_told = 0
        """Prompt tokens that came: so far, when the step under way began, and of which the last report knew."""
        self._decoding = Decoding(model.block_size)
        self._prefilling: list[Sequence] = []
        """The sequences with an unfinished prompt, in order."""
        self._stretch = Stretch(start=now, steps=0, first_seconds=0.0, growth_seconds=0.0)
        self._chunks: list[tuple[Sequence, int]] = []
        """Prompt tokens in the current step."""
        self._blocked: Sequence | None = None
        """The first in the queue, when it did not fit, and the blocks that were free then."""
        self._blocked_free = 0

    # --- what the fleet does with it ---

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def idle_since(self) -> float:
        """The time since which the engine is idle."""
        return self._clock

    @property
    def next_time(self) -> float:
        """When something happens next, of itself."""
        return self.end if self.end < inf or not self.num_unfinished else self._clock

    def is_full_for(self, sequence: Sequence) -> bool:
        """Return whether the engine would reject it because its queue is full."""
        model = self._model
        most_tokens = model.max_queued_kv_caches * self.kv.num_blocks * model.block_size
        return len(self.waiting) >= model.max_queued_requests or (
            bool(self.waiting) and self._queued_tokens + sequence.prompt_tokens > most_tokens
        )

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a request; the engine is advanced to ``now``."""
        sequence.replica = self.name
        self._counters.arrived(sequence)
        self._received += sequence.prompt_tokens
        if not self._can_serve(sequence):
            sequence.outcome = Outcome.FAILED
            self._counters.finished += 1
            return
        self._queued_tokens += sequence.known
        self.waiting.append(sequence)
        if self.end == inf:
            self._clock = max(self._clock, now)
        elif len(self.waiting) == 1 and len(self.running) < self._model.max_sequences:
            self.cut(now)

    def _can_serve(self, sequence: Sequence) -> bool:
        """Return whether it fits the model, with its output limited to that, and the KV cache."""
        most = self._model.max_model_length
        if most is not None:
            if sequence.prompt_tokens >= most:
                return False
            sequence.output_tokens = min(sequence.output_tokens, most - sequence.prompt_tokens)
        # The last token is drawn but never computed.
        return self.kv.blocks(sequence.prompt_tokens + sequence.output_tokens - 1) <= self.kv.num_blocks

    def advance(self, now: float) -> None:
        """Take the steps that end by then, and begin those that begin before it."""
        while True:
            if self.end <= now:
                self._clock = self.end
                self._commit(self.end)
                self.end = inf
            elif self.end < inf:
                return
            if self._clock >= now or not (self.running or self.waiting):
                return
            self._begin(self._clock)

    def cut(self, now: float) -> None:
        """Schedule again after the current step."""
        if self.end < inf and not self._chunks:
            self._stretch.cut(now)
            self.end = self._stretch.end

    def set_factor(self, factor: float, now: float) -> None:
        """Set the factor of step times from now on; the current step keeps its own."""
        if factor != self._factor:
            self._factor = factor
            self.cut(now)

    # --- what a scrape sees ---

    @property
    def num_finished(self) -> int:
        return self._counters.finished

    def gauges(self, now: float) -> Gauges:
        """Return the gauges; the engine is advanced to ``now``."""
        done = self._steps_done(now)
        return self._gauges(self._decoding.growth(done)) if done else self._told

    def _gauges(self, grown: int) -> Gauges:
        waiting, tokens = self._queue
        lacking = sum([sequence.known - sequence.computed for sequence in self._prefilling])
        return Gauges(waiting, len(self.running), tokens, self.kv.used + grown, lacking)

    @property
    def max_sequences(self) -> int:
        return self._model.max_sequences

    @property
    def computed_prompt_tokens(self) -> int:
        return self._counters.computed_prompt_tokens

    def busy_seconds(self, now: float) -> float:
        """In steps, the engine having been advanced to ``now``."""
        return self._counters.busy_seconds + self._stretch.seconds(self._steps_done(now))

    def pending_prefill_tokens(self) -> float:
        """Return the prompt tokens still to compute according to the last report, and those that arrived after it.

        For waiting prompts the usual cached share is subtracted.
        """
        waiting = self._told.queued_tokens + self._received - self._received_told
        return self._told.prefilling_tokens + waiting * (1.0 - self._counters.hit_share)

    def sample(self, now: float) -> ReplicaSample:
        """Return what a scrape of a real engine would; the engine is advanced to ``now``."""
        counters, block_size, done = self._counters, self.kv.block_size, self._steps_done(now)
        gauges = self.gauges(now)
        return ReplicaSample(
            time=now,
            waiting=gauges.waiting,
            running=gauges.running,
            queued_prompt_tokens=gauges.queued_tokens,
            kv_tokens_used=gauges.kv_blocks * block_size,
            kv_tokens_capacity=self.kv.num_blocks * block_size,
            arrived_requests=counters.arrived_requests,
            arrived_prompt_tokens=counters.arrived_uncached_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generation_tokens=counters.generation_tokens + done * len(self._decoding),
            finished_requests=counters.finished,
            steps=counters.steps + done,
            busy_seconds=self.busy_seconds(now),
            first_token_waits=counters.first_token_waits(),
            first_token_times=counters.first_token_times(),
            token_gaps=counters.gaps(),
        )

    def _steps_done(self, now: float) -> int:
        """Return the steps of the current stretch that are not committed."""
        return 0 if self.end == inf or self._chunks else self._stretch.done(now)

    # --- a step begins ---

    def _begin(self, now: float) -> None:
        preempted = self._make_room(0)
        decoding = len(self._decoding)
        seconds = self._model.step_seconds + self._decode_seconds()
        self._stall_bound.begin(seconds, decoding=decoding > 0)
        budget = self._model.max_batched_tokens - decoding
        self._chunks = []
        if self._prefilling:
            budget, squeezed = self._continue_prompts(budget)
            preempted = preempted or squeezed
        if self.waiting and not preempted:
            self._admit(budget, now)
        self._queue = (len(self.waiting), self._queued_tokens)
        self._received_at_begin = self._received
        steps, growth = 1, 0.0
        if self._chunks:
            seconds = self._model.step_seconds + self._decode_seconds() + self._chunk_seconds()
        elif not preempted:
            steps = self._decoding.most_steps(self.kv.free)
            growth = decoding * self._model.decode_seconds_per_kv_token
        self._stretch = Stretch(
            start=now, steps=steps, first_seconds=seconds * self._factor, growth_seconds=growth * self._factor
        )
        self.end = self._stretch.end

    def _decode_seconds(self) -> float:
        model, decoding = self._model, self._decoding
        return len(decoding) * model.decode_seconds_per_sequence + decoding.tokens * model.decode_seconds_per_kv_token

    def _chunk_seconds(self) -> float:
        tokens = sum(count for _, count in self._chunks)
        pairs = sum(count * (sequence.computed + count / 2) for sequence, count in self._chunks)
        model = self._model
        return tokens / model.prefill_tokens_per_second + pairs * model.prefill_seconds_per_pair

    def _continue_prompts(self, budget: int) -> tuple[int, bool]:
        """Chunks of those that run; what is left of the budget, and whether anybody was preempted for their blocks."""
        preempted = False
        behind = len(self._prefilling)
        for sequence in tuple(self._prefilling):
            behind -= 1
            start = sequence.computed
            # One token is left for everyone behind.
            count = self._stall_bound.limit(min(sequence.known - start, budget - behind), start)
            if count < 1:
                continue
            if self._decoding.growth(1) + self.kv.lacking(sequence, start + count) > self.kv.free:
                preempted = True
                self._make_room(self.kv.lacking(sequence, start + count), sequence)
            if sequence not in self._prefilling:
                break  # it was the last in order itself
            self._schedule(sequence, count)
            budget -= count
        return budget, preempted

    def _schedule(self, sequence: Sequence, count: int) -> None:
        self.kv.grow(sequence, sequence.computed + count)
        self.kv.publish(sequence, sequence.computed + count)
        self._stall_bound.add(sequence.computed, count)
        self._chunks.append((sequence, count))

    def _admit(self, budget: int, now: float) -> None:
        """In order, as long as the first in the queue fits."""
        while self.waiting and budget >= 1 and len(self.running) < self._model.max_sequences:
            sequence = self.waiting[0]
            if sequence is self._blocked and self.kv.free <= self._blocked_free:
                return
            hit = self.kv.hit(sequence)
            if not self._fits(sequence, hit):
                self._blocked, self._blocked_free = sequence, self.kv.free
                return
            start = self.kv.prefix_tokens(hit)
            count = self._stall_bound.limit(min(sequence.known - start, budget), start)
            if count < 1:
                return
            self.waiting.popleft()
            self._enter(sequence, hit, now)
            self._schedule(sequence, count)
            budget -= count

    def _fits(self, sequence: Sequence, hit: int) -> bool:
        """Return its known tokens, in addition to the unfinished prompts of started sequences."""
        begun = sum(self.kv.lacking(other, other.known) for other in self._prefilling)
        needed = self.kv.missing(sequence, hit) + begun + self._decoding.growth(1)
        return needed <= self.kv.free - (self._headroom if self.running else 0)

    def _enter(self, sequence: Sequence, hit: int, now: float) -> None:
        self._queued_tokens -= sequence.known
        self.kv.enter(sequence, hit)
        insort(self.running, sequence, key=_order)
        insort(self._prefilling, sequence, key=_order)
        if sequence.own_prefill_seconds is None:
            sequence.first_scheduled = now
            sequence.cached = sequence.computed
            uncached = sequence.prompt_tokens - sequence.computed
            sequence.own_prefill_seconds = self._model.prefill_seconds(uncached, cached=sequence.computed)
            self._counters.admitted(sequence)

    # --- preemption ---

    def _make_room(self, blocks: int, sequence: Sequence | None = None) -> bool:
        """Free blocks in addition to those of the next decode step by preempting the last in order.

        Return whether a sequence was preempted. It stops at ``sequence``, which needs the blocks.
        """
        preempted = False
        while blocks + self._decoding.growth(1) > self.kv.free:
            preempted = True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                break
        return preempted

    def _preempt(self, victim: Sequence) -> None:
        self.running.pop()
        if victim.decoding_since is None:
            self._prefilling.remove(victim)
        else:
            self._decoding.leave(victim)
            self.kv.settle(victim)
        self.kv.release(victim)
        victim.preemptions += 1
        self._blocked = None
        self._queued_tokens += victim.known
        self.waiting.appendleft(victim)

    # --- a step ends ---

    def _commit(self, end: float) -> None:
        stretch, counters, decoding = self._stretch, self._counters, len(self._decoding)
        counters.steps += stretch.steps
        counters.busy_seconds += end - stretch.start
        if decoding:
            self.kv.take(self._decoding.growth(stretch.steps))
            counters.generation_tokens += stretch.steps * decoding
            # The steps of a stretch differ by the growth of contexts only: their mean stands for each.
            counters.token_gaps(stretch.steps * decoding, (end - stretch.start) / stretch.steps)
            for sequence in self._decoding.advance(stretch.steps):
                self.kv.settle(sequence)
                self._finish(sequence, end)
        for sequence, count in self._chunks:
            sequence.computed += count
            if sequence.computed == sequence.known:
                self._draw(sequence, end)
        counters.computed_prompt_tokens += sum([count for _, count in self._chunks])
        self._chunks = []
        self._told = self._gauges(0)
        self._received_told = self._received_at_begin

    def _draw(self, sequence: Sequence, end: float) -> None:
        """Sample the token that follows a prompt or a recomputation."""
        self._prefilling.remove(sequence)
        self._blocked = None  # what was kept for it may be more than it took
        self._counters.generation_tokens += 1
        sequence.generated += 1
        sequence.known += 1
        if sequence.first_token is None:
            sequence.first_token = end
            assert sequence.first_scheduled is not None
            self._counters.first_token(sequence.first_scheduled - sequence.arrival, end - sequence.arrival)
        if sequence.generated >= sequence.output_tokens:
            self._finish(sequence, end)
        else:
            self._decoding.join(sequence)

    def _finish(self, sequence: Sequence, end: float) -> None:
        sequence.finish = end
        sequence.outcome = Outcome.FINISHED
        self.running.remove(sequence)
        self.kv.release(sequence)
        self._counters.finished += 1
