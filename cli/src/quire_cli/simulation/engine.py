"""One simulated engine: a queue, KV blocks with a prefix cache, a batch that takes steps, and what a scrape shows.

As in the real scheduler, each decoding sequence samples a token per step, the rest of the token budget goes to prompts
in their order, and the first of the queue is admitted once it fits as a whole. If blocks run out, the last in order is
preempted and recomputed. While all sequences decode and none can be admitted, the steps until that changes are one
event, so that a trace of an hour takes seconds (ADR 0142). tests/contract compares it with the real scheduler.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf
from operator import attrgetter

from quire_cli.simulation.results import Outcome, RequestResult
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import Histogram, ReplicaSample

FIRST_TOKEN_WAIT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0, inf),
)
TOKEN_GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, inf),
)
_HEADROOM = 0.01
"""The share of blocks that admission leaves free, so that the next decode steps do not preempt a new sequence."""
_LEAST_SHARE_OF_PROMPTS = 0.25
"""The share of the stall bound that prompts get even if decoding alone takes the whole bound, as in the engine."""
_MAX_STEP_SECONDS = 2.0
"""The bound on a step while no sequence decodes, as in the engine."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The engine of one replica.

    The time of a step is step_seconds + prompt tokens / prefill_tokens_per_second + decode_seconds_per_sequence ·
    decoding sequences + decode_seconds_per_kv_token · their tokens.
    """

    prefill_tokens_per_second: float
    step_seconds: float
    decode_seconds_per_sequence: float
    kv_tokens: int
    decode_seconds_per_kv_token: float = 0.0
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    max_model_length: int | None = None
    """Tokens of one sequence, prompt and answer; longer prompts are refused, longer answers cut. None: no limit."""
    block_size: int = 16
    prefix_caching: bool = True
    max_generation_stall_seconds: float | None = 0.25
    """The time a step may spend on prompts while others generate; None limits it by ``max_batched_tokens`` only."""
    max_queued_requests: int = 1024
    max_queued_kv_caches: int = 8
    """More prompt tokens than fill the KV cache so many times may not wait: the engine turns requests away."""

    def prefill_seconds(self, tokens: int) -> float:
        """Return the time of ``tokens`` of a prompt on an idle engine."""
        return ceil(tokens / self.max_batched_tokens) * self.step_seconds + tokens / self.prefill_tokens_per_second


class Sequence:
    """A request in an engine: ``known`` tokens, prompt and output so far, of which ``computed`` are in the KV cache."""

    def __init__(self, request: Request, *, order: int, prefix_block_tokens: int) -> None:
        self.order = order
        self.result = RequestResult(request.time, request.prompt_tokens, request.output_tokens)
        self.arrival, self.prompt_tokens = request.time, request.prompt_tokens
        # Only whole blocks can be shared, and the last token of a prompt is always computed.
        self.prefix = request.prefix_blocks[: request.prompt_tokens // prefix_block_tokens]
        self.num_prefix = min(len(self.prefix), (request.prompt_tokens - 1) // prefix_block_tokens)
        self.known = request.prompt_tokens
        self.computed = self.generated = self.private_blocks = 0
        self.shared = 0
        """The blocks of ``prefix`` that it uses in the prefix cache, from the first one on."""
        self.decodes = False
        self.first_scheduled: float | None = None


_order = attrgetter("order")


class KVCache:
    """The blocks of sequences, and of prefixes (of the trace's size) that the prefix cache keeps.

    Prefix blocks that no sequence uses are evicted on demand, the least recently used first.
    """

    def __init__(self, model: EngineModel, prefix_block_tokens: int) -> None:
        self.num_blocks = model.kv_tokens // model.block_size
        self.block_size = model.block_size
        self.used = 0
        """Blocks that a sequence holds; the others are free, cached or not."""
        self._prefix_tokens = prefix_block_tokens
        self._prefix_caching = model.prefix_caching
        self._holders: dict[int, int] = {}
        """The number of sequences that use a prefix block."""
        self._unused: OrderedDict[int, int] = OrderedDict()
        """The sizes of unused prefix blocks, the least recently used first."""
        self._num_unused = 0

    @property
    def free(self) -> int:
        return self.num_blocks - self.used

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def whole(self, count: int) -> int:
        """Return the engine's whole blocks within so many prefix blocks."""
        return count * self._prefix_tokens // self.block_size

    def _size(self, place: int) -> int:
        return self.whole(place + 1) - self.whole(place)

    def hit(self, sequence: Sequence) -> int:
        """Return the number of its leading prefix blocks that are cached."""
        count = 0
        if self._prefix_caching:
            for block in sequence.prefix[: sequence.num_prefix]:
                if block not in self._holders and block not in self._unused:
                    break
                count += 1
        return count

    def missing(self, sequence: Sequence, hit: int) -> int:
        """Return the free blocks for all that is known of a sequence that holds nothing yet."""
        shared = sum(self._size(place) for place in range(hit) if sequence.prefix[place] in self._holders)
        return self.blocks(sequence.known) - shared

    def lacking(self, sequence: Sequence, end: int) -> int:
        """Return the free blocks that make a sequence's blocks reach ``end`` tokens."""
        return self.blocks(end) - self.whole(sequence.shared) - sequence.private_blocks

    def enter(self, sequence: Sequence, hit: int) -> None:
        """Let it hold what was found of its prefix."""
        for block in sequence.prefix[:hit]:
            if (size := self._unused.pop(block, None)) is not None:
                self._num_unused -= size
                self.used += size
            self._holders[block] = self._holders.get(block, 0) + 1
        sequence.shared, sequence.computed = hit, self.whole(hit) * self.block_size

    def grow(self, sequence: Sequence, end: int) -> None:
        """Make its blocks reach ``end`` tokens."""
        count = self.lacking(sequence, end)
        sequence.private_blocks += count
        self.used += count
        assert self.used <= self.num_blocks, "more KV blocks than there are"
        while self._num_unused > self.free:
            self._num_unused -= self._unused.popitem(last=False)[1]

    def publish(self, sequence: Sequence, end: int) -> None:
        """Publish the blocks of its prompt up to ``end``, which the next step computes before others read them.

        If another sequence published a block first, this block and the following ones stay private.
        """
        prefix, place = sequence.prefix, sequence.shared
        while self._prefix_caching and place < len(prefix) and (place + 1) * self._prefix_tokens <= end:
            if prefix[place] in self._holders or prefix[place] in self._unused:
                break
            self._holders[prefix[place]] = 1
            sequence.private_blocks -= self._size(place)
            place += 1
        sequence.shared = place

    def release(self, sequence: Sequence) -> None:
        """Release a sequence. The end of its prefix is evicted first, because fewer sequences share it."""
        for place in reversed(range(sequence.shared)):
            block, size = sequence.prefix[place], self._size(place)
            if holders := self._holders.pop(block) - 1:
                self._holders[block] = holders
                continue
            self.used -= size
            self._unused[block] = size
            self._num_unused += size
        self.used -= sequence.private_blocks
        sequence.private_blocks = sequence.shared = sequence.computed = 0


@dataclass(slots=True, kw_only=True)
class _Counters:
    """The counters of ``/metrics``, from zero at the engine's start."""

    arrived_requests: int = 0
    arrived_prompt_tokens: float = 0.0
    """Uncached: each prompt counts with the share that is expected not to be in the cache."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished_requests: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    waits: list[int] = field(default_factory=lambda: [0] * len(FIRST_TOKEN_WAIT_BOUNDS))
    times: list[int] = field(default_factory=lambda: [0] * len(FIRST_TOKEN_WAIT_BOUNDS))
    gaps: list[int] = field(default_factory=lambda: [0] * len(TOKEN_GAP_BOUNDS))

    @property
    def uncached_share(self) -> float:
        return 1.0 - self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The gauges at the end of the last step: a scrape shows neither the current step nor later arrivals."""

    waiting: int = 0
    running: int = 0
    queued_tokens: int = 0
    kv_blocks: int = 0
    prefilling_tokens: int = 0
    """Prompt tokens that running sequences still have to compute."""
    received_tokens: int = 0
    """Prompt tokens that had arrived when the step began."""


class Engine:
    """An engine that its owner advances to a time before each call. ``factor`` multiplies the time of steps."""

    def __init__(
        self, model: EngineModel, *, name: str, prefix_block_tokens: int, now: float = 0.0, factor: float = 1.0
    ) -> None:
        self.name = name
        self.model = model
        self.kv = KVCache(model, prefix_block_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order: the last is the first to be preempted."""
        self.end = inf
        """When the current steps end; infinite between two."""
        self.clock = now
        """When the next step begins if there is anything to do; otherwise the time since which the engine is idle."""
        self.counters = _Counters()
        self._factor = factor
        self._start, self._steps, self._seconds_per_step = now, 0, 0.0
        self._reported = Gauges()
        self._queue = (0, 0, 0)
        """Sequences and tokens that waited, and tokens that had arrived, when the current step began."""
        self._queued_tokens = self._received_tokens = 0
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []
        """Prompt tokens in the current step."""
        self._prompt_seconds = inf
        """The time that is left for prompts in the step that is planned."""
        self._blocked: tuple[Sequence, int] | None = None
        """The first in the queue, when it did not fit, and the blocks that were free then."""

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def is_full_for(self, sequence: Sequence) -> bool:
        """Return whether the engine would reject it because its queue is full."""
        model = self.model
        most_tokens = model.max_queued_kv_caches * self.kv.num_blocks * model.block_size
        return len(self.waiting) >= model.max_queued_requests or (
            bool(self.waiting) and self._queued_tokens + sequence.prompt_tokens > most_tokens
        )

    def add(self, sequence: Sequence, now: float) -> None:
        sequence.result.replica = self.name
        self.counters.arrived_requests += 1
        self.counters.arrived_prompt_tokens += sequence.prompt_tokens * self.counters.uncached_share
        self._received_tokens += sequence.prompt_tokens
        if not self._can_serve(sequence):
            sequence.result.outcome = Outcome.FAILED
            self.counters.finished_requests += 1
            return
        self._queued_tokens += sequence.known
        self.waiting.append(sequence)
        if self.end == inf:
            self.clock = max(self.clock, now)
        elif len(self.waiting) == 1 and len(self.running) < self.model.max_sequences:
            self._cut(now)

    def _can_serve(self, sequence: Sequence) -> bool:
        """Return whether it fits the model, with its output limited to that, and the KV cache."""
        most, result = self.model.max_model_length, sequence.result
        if most is not None:
            if sequence.prompt_tokens >= most:
                return False
            result.output_tokens = min(result.output_tokens, most - sequence.prompt_tokens)
        # The last token is sampled but never computed.
        return self.kv.blocks(sequence.prompt_tokens + result.output_tokens - 1) <= self.kv.num_blocks

    def advance(self, now: float) -> None:
        """Complete the steps that end by then, and begin those that begin before it."""
        while True:
            if self.end <= now:
                self.clock, self.end = self.end, inf
                self._commit()
            elif self.end < inf:
                return
            if self.clock >= now or not self.num_unfinished:
                return
            self._begin()

    def _cut(self, now: float) -> None:
        """Schedule again after the current step."""
        if self.end < inf and not self._chunks:
            begun = ceil((now - self._start) / self._seconds_per_step - _ROUNDING)
            self._steps = max(1, min(begun, self._steps))
            self.end = self._start + self._steps * self._seconds_per_step

    def set_factor(self, factor: float, now: float) -> None:
        """Set the factor of step times from now on; the current step keeps its own."""
        self._factor = factor
        self._cut(now)

    def fail_all(self) -> None:
        for sequence in (*self.running, *self.waiting):
            sequence.result.outcome = Outcome.FAILED

    # --- what a scrape shows ---

    def gauges(self, now: float) -> Gauges:
        done = self._steps_done(now)
        return self._gauges(self._growth(done)) if done else self._reported

    def _gauges(self, grown: int) -> Gauges:
        waiting, queued_tokens, received_tokens = self._queue
        prefilling = sum([sequence.known - sequence.computed for sequence in self._prefilling])
        return Gauges(waiting, len(self.running), queued_tokens, self.kv.used + grown, prefilling, received_tokens)

    def busy_seconds(self, now: float) -> float:
        return self.counters.busy_seconds + self._steps_done(now) * self._seconds_per_step

    def pending_prefill_tokens(self) -> float:
        """Return the prompt tokens still to compute by the last report, and those that arrived after it.

        For waiting prompts the usual cached share is subtracted.
        """
        reported = self._reported
        waiting = reported.queued_tokens + self._received_tokens - reported.received_tokens
        return reported.prefilling_tokens + waiting * self.counters.uncached_share

    def sample(self, now: float) -> ReplicaSample:
        """Return what a scrape of a real engine would."""
        counters, block_size, done, gauges = self.counters, self.kv.block_size, self._steps_done(now), self.gauges(now)

        def histogram(bounds: tuple[float, ...], counts: list[int]) -> Histogram:
            return Histogram(bounds=bounds, counts=tuple(accumulate(counts)))

        return ReplicaSample(
            time=now,
            waiting=gauges.waiting,
            running=gauges.running,
            queued_prompt_tokens=gauges.queued_tokens,
            kv_tokens_used=gauges.kv_blocks * block_size,
            kv_tokens_capacity=self.kv.num_blocks * block_size,
            arrived_requests=counters.arrived_requests,
            arrived_prompt_tokens=counters.arrived_prompt_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generation_tokens=counters.generation_tokens + done * len(self._decoding),
            finished_requests=counters.finished_requests,
            steps=counters.steps + done,
            busy_seconds=self.busy_seconds(now),
            first_token_waits=histogram(FIRST_TOKEN_WAIT_BOUNDS, counters.waits),
            first_token_times=histogram(FIRST_TOKEN_WAIT_BOUNDS, counters.times),
            token_gaps=histogram(TOKEN_GAP_BOUNDS, counters.gaps),
        )

    def _steps_done(self, now: float) -> int:
        """Return the current steps that have ended and are not committed."""
        if self.end == inf or self._chunks:
            return 0
        return min(self._steps, int((now - self._start) / self._seconds_per_step + _ROUNDING))

    # --- a step begins ---

    def _growth(self, steps: int) -> int:
        """Return the blocks that decoding sequences take in the next so many steps."""
        return sum([self.kv.lacking(sequence, sequence.computed + steps) for sequence in self._decoding])

    def _begin(self) -> None:
        model = self.model
        preempted = self._make_room(0)
        seconds = self._decode_seconds(0)
        bound = model.max_generation_stall_seconds if self._decoding else _MAX_STEP_SECONDS
        self._prompt_seconds = inf if bound is None else max(bound - seconds, _LEAST_SHARE_OF_PROMPTS * bound)
        budget = model.max_batched_tokens - len(self._decoding)
        self._chunks = []
        budget, squeezed = self._continue_prompts(budget)
        preempted = preempted or squeezed
        if self.waiting and not preempted:
            self._admit(budget)
        self._queue = (len(self.waiting), self._queued_tokens, self._received_tokens)
        self._steps = 1
        if self._chunks:
            tokens = sum([count for _, count in self._chunks])
            seconds = self._decode_seconds(0) + tokens / model.prefill_tokens_per_second
        elif not preempted:
            self._steps = self._most_steps()
            seconds = self._decode_seconds((self._steps - 1) / 2)  # their mean: contexts grow in the meantime
        self._start, self._seconds_per_step = self.clock, seconds * self._factor
        self.end = self._start + self._steps * self._seconds_per_step

    def _most_steps(self) -> int:
        """Return the steps until a sequence finishes or the blocks are taken; at least one fits."""
        steps = min([sequence.result.output_tokens - sequence.generated for sequence in self._decoding])
        if self._growth(steps) <= self.kv.free:
            return steps
        return max(1, bisect_left(range(steps), True, key=lambda fewer: self._growth(fewer + 1) > self.kv.free))

    def _decode_seconds(self, later_steps: float) -> float:
        """Return the time of the step that follows so many, without prompts."""
        model, count, tokens = self.model, len(self._decoding), 0.0
        if model.decode_seconds_per_kv_token:
            tokens = sum([sequence.computed for sequence in self._decoding]) + count * later_steps
        per_token = model.decode_seconds_per_kv_token
        return model.step_seconds + count * model.decode_seconds_per_sequence + tokens * per_token

    def _limit(self, count: int) -> int:
        """Return how many of ``count`` tokens of a prompt the step may compute; at least a block in all."""
        rate = self.model.prefill_tokens_per_second
        if count <= 1 or self._prompt_seconds * rate == inf:
            return count
        scheduled = sum([tokens for _, tokens in self._chunks])
        fitting = int(max(self._prompt_seconds, 0.0) / (1.0 / rate))
        return min(count, max(fitting, self.kv.block_size - scheduled, 0))

    def _continue_prompts(self, budget: int) -> tuple[int, bool]:
        """Schedule unfinished prompts. Return the rest of the budget, and whether one was preempted for another."""
        preempted = False
        behind = len(self._prefilling)
        for sequence in tuple(self._prefilling):
            behind -= 1
            # One token is left for everyone behind.
            count = self._limit(min(sequence.known - sequence.computed, budget - behind))
            if count < 1:
                continue
            lacking = self.kv.lacking(sequence, sequence.computed + count)
            if self._growth(1) + lacking > self.kv.free:
                preempted = True
                self._make_room(lacking, sequence)
            if sequence not in self._prefilling:
                break  # it was the last in order itself
            self._schedule(sequence, count)
            budget -= count
        return budget, preempted

    def _schedule(self, sequence: Sequence, count: int) -> None:
        self.kv.grow(sequence, sequence.computed + count)
        self.kv.publish(sequence, sequence.computed + count)
        self._prompt_seconds -= count / self.model.prefill_tokens_per_second
        self._chunks.append((sequence, count))

    def _admit(self, budget: int) -> None:
        """Admit sequences in order, as long as the first in the queue fits."""
        while self.waiting and budget >= 1 and len(self.running) < self.model.max_sequences:
            sequence = self.waiting[0]
            if self._blocked is not None and sequence is self._blocked[0] and self.kv.free <= self._blocked[1]:
                return
            hit = self.kv.hit(sequence)
            if not self._fits(sequence, hit):
                self._blocked = sequence, self.kv.free
                return
            count = self._limit(min(sequence.known - self.kv.whole(hit) * self.kv.block_size, budget))
            if count < 1:
                return
            self.waiting.popleft()
            self._enter(sequence, hit)
            self._schedule(sequence, count)
            budget -= count

    def _fits(self, sequence: Sequence, hit: int) -> bool:
        """Return whether its known tokens fit next to the unfinished prompts of started sequences."""
        begun = sum([self.kv.lacking(other, other.known) for other in self._prefilling])
        needed = self.kv.missing(sequence, hit) + begun + self._growth(1)
        return needed <= self.kv.free - (int(self.kv.num_blocks * _HEADROOM) if self.running else 0)

    def _enter(self, sequence: Sequence, hit: int) -> None:
        self._queued_tokens -= sequence.known
        self.kv.enter(sequence, hit)
        insort(self.running, sequence, key=_order)
        insort(self._prefilling, sequence, key=_order)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = self.clock
            result = sequence.result
            result.cached_tokens = sequence.computed
            result.own_prefill_seconds = self.model.prefill_seconds(sequence.prompt_tokens - sequence.computed)
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_prompt_tokens += sequence.computed

    def _make_room(self, blocks: int, sequence: Sequence | None = None) -> bool:
        """Free blocks in addition to those of the next decode step by preempting the last in order.

        Return whether a sequence was preempted. It stops at ``sequence``, which needs the blocks.
        """
        preempted = False
        while blocks + self._growth(1) > self.kv.free:
            preempted = True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                break
        return preempted

    def _preempt(self, victim: Sequence) -> None:
        self.running.pop()
        (self._decoding if victim.decodes else self._prefilling).remove(victim)
        victim.decodes = False
        self.kv.release(victim)
        victim.result.preemptions += 1
        self._blocked = None
        self._queued_tokens += victim.known
        self.waiting.appendleft(victim)

    # --- a step ends ---

    def _commit(self) -> None:
        counters, decoding, steps = self.counters, len(self._decoding), self._steps
        counters.steps += steps
        counters.busy_seconds += steps * self._seconds_per_step
        if decoding:
            counters.gaps[bisect_left(TOKEN_GAP_BOUNDS, self._seconds_per_step)] += steps * decoding
            for sequence in tuple(self._decoding):
                self.kv.grow(sequence, sequence.computed + steps)
                sequence.computed += steps
                self._sampled(sequence, steps)
        for sequence, count in self._chunks:
            counters.computed_prompt_tokens += count
            sequence.computed += count
            if sequence.computed == sequence.known:
                self._prefilling.remove(sequence)
                self._blocked = None  # what was kept for it may be more than it took
                self._sampled(sequence, 1)
        self._chunks = []
        self._reported = self._gauges(0)

    def _sampled(self, sequence: Sequence, tokens: int) -> None:
        """Count the tokens that a sequence has sampled: decoding, or after a prompt or a recomputation."""
        result, counters = sequence.result, self.counters
        counters.generation_tokens += tokens
        sequence.generated += tokens
        sequence.known += tokens
        if result.first_token is None:
            assert sequence.first_scheduled is not None
            result.first_token = self.clock
            waited, whole = sequence.first_scheduled - sequence.arrival, self.clock - sequence.arrival
            counters.waits[bisect_left(FIRST_TOKEN_WAIT_BOUNDS, waited)] += 1
            counters.times[bisect_left(FIRST_TOKEN_WAIT_BOUNDS, whole)] += 1
        if sequence.generated >= result.output_tokens:
            result.finish, result.outcome = self.clock, Outcome.FINISHED
            if sequence.decodes:
                self._decoding.remove(sequence)
            self.running.remove(sequence)
            self.kv.release(sequence)
            counters.finished_requests += 1
        elif not sequence.decodes:
            sequence.decodes = True
            self._decoding.append(sequence)
