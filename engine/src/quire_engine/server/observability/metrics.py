"""The figures behind /metrics: vLLM's metrics with vLLM's names, labels and buckets, and quire's own as ``quire_…``.

Requests report here when they arrive, get tokens and end; the engine's own figures arrive as ``Stats`` messages.
Nothing is formatted before a scrape, and a scrape reads a few hundred numbers, however many requests run.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field

from quire_engine.ipc.messages import Ready, Stats
from quire_engine.server.observability.histogram import Histogram, one_two_five

TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
PER_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class RequestTimes:
    """The milestones of one sequence, in monotonic seconds as the API process observed them."""

    arrived: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class EngineFigures:
    """The counters of the engine, which continue over restarts of its process, because a counter must not decrease."""

    latest: Stats | None = None
    before: dict[str, float] = field(default_factory=dict)
    """The totals of earlier processes of this engine."""

    def counters(self) -> dict[str, float]:
        """Return the total of each counter over all processes of this engine."""
        now = {} if self.latest is None else _flat_counters(self.latest)
        return {name: self.before.get(name, 0.0) + now.get(name, 0.0) for name in self.before.keys() | now.keys()}

    def process_ended(self) -> None:
        """Keep the totals of the process that has ended."""
        self.before = self.counters()
        self.latest = None


def _flat_counters(stats: Stats) -> dict[str, float]:
    """Return the counters by name; a counter with a label is called name/label."""
    counters = stats.counters
    plain = ("steps", "prompt_tokens", "generation_tokens", "scheduled_tokens", "discarded_tokens", "recomputed_tokens")
    flat = {name: float(getattr(counters, name)) for name in (*plain, "prefix_cache_queries", "prefix_cache_hits")}
    flat["swapped_blocks/out"] = float(counters.swapped_out_blocks)
    flat["adapter_loads"] = float(counters.adapter_loads)
    flat["swapped_blocks/in"] = float(counters.swapped_in_blocks)
    flat |= {f"preemptions/{cause}": float(count) for cause, count in counters.preemptions.items()}
    flat |= {name: float(getattr(counters, name)) for name in ("num_drafts", "draft_tokens", "accepted_tokens")}
    flat |= {f"accepted_at/{place}": float(count) for place, count in enumerate(counters.accepted_by_position)}
    flat |= {f"undrafted/{reason}": float(count) for reason, count in counters.undrafted_sequences.items()}
    flat |= {f"step_seconds/{part}": seconds for part, seconds in asdict(stats.seconds).items()}
    return flat


class Metrics:
    """The state behind /metrics: one object per API process, which only its event loop uses."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.model_name = model_name
        self.engine = EngineFigures()
        self.ready: Ready | None = None
        self.restarts = 0
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN)
        self.first_token_wait = Histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = Histogram(PER_TOKEN)
        self.time_per_output_token = Histogram(PER_TOKEN)
        self.e2e_latency = Histogram(PER_REQUEST)
        self.queue_time = Histogram(PER_REQUEST)
        self.prefill_time = Histogram(PER_REQUEST)
        self.decode_time = Histogram(PER_REQUEST)
        self.inference_time = Histogram(PER_REQUEST)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.prompt_tokens = Histogram(one_two_five(max_model_len))
        self.generation_tokens = Histogram(one_two_five(max_model_len))
        self.finished: Counter[str] = Counter({reason: 0 for reason in FINISH_REASONS})
        self.rejected: Counter[str] = Counter()
        self.arrived_requests = 0
        self.arrived_prompt_tokens = 0
        self.uncached_prompt_tokens = 0.0
        self._sent_prompt_tokens = 0

    # --- reports of the engine process ---

    def engine_ready(self, ready: Ready) -> None:
        """Record that an engine process has become ready."""
        if self.ready is not None:
            self.engine.process_ended()
            self.restarts += 1
        self.ready = ready
        self._sent_prompt_tokens = 0

    def engine_sent(self, prompt_tokens: int) -> None:
        """Record the tokens of a prompt that was sent to the engine."""
        self._sent_prompt_tokens += prompt_tokens

    def engine_stats(self, stats: Stats) -> None:
        """Record a report of the engine."""
        before = self.engine.latest
        counters = stats.counters
        steps = counters.steps - (before.counters.steps if before else 0)
        if steps > 0:
            # Between two reports only the sum is known: several quick steps count as steps of their mean size.
            tokens = counters.scheduled_tokens - (before.counters.scheduled_tokens if before else 0)
            self.iteration_tokens.observe(tokens / steps, steps)
        self.engine.latest = stats

    def engine_lost(self) -> None:
        """Record that the engine process has ended."""
        self.engine.process_ended()
        self._sent_prompt_tokens = 0

    # --- reports of sequences ---

    def arrived(self, prompt_tokens: int) -> None:
        """Count a sequence that was submitted."""
        self.arrived_requests += 1
        self.arrived_prompt_tokens += prompt_tokens
        self.uncached_prompt_tokens += prompt_tokens * (1.0 - self._hit_share())

    def _hit_share(self) -> float:
        """Return the share of prompt tokens found in the prefix cache so far, as the estimate for a new prompt."""
        counters = self.engine.counters()
        queries = counters.get("prefix_cache_queries", 0.0)
        return counters.get("prefix_cache_hits", 0.0) / queries if queries else 0.0

    def pending_prefill_tokens(self) -> float:
        """Return the prompt tokens still to be computed, by the engine's last report and what was sent to it since.

        Of queued prompts, the share that the prefix cache is expected to contain does not count.
        """
        stats = self.engine.latest
        if stats is None:
            return self._sent_prompt_tokens * (1.0 - self._hit_share())
        unseen = max(0, self._sent_prompt_tokens - stats.received_prompt_tokens)
        waiting = max(0, stats.gauges.queued_tokens - stats.gauges.parked_tokens)
        return stats.gauges.prefilling_tokens + (waiting + unseen) * (1.0 - self._hit_share())

    def first_token(self, times: RequestTimes, now: float) -> None:
        """Record the first token of a sequence."""
        times.first_token = times.last_token = now
        self.time_to_first_token.observe(now - times.arrived)
        scheduled = times.first_scheduled if times.first_scheduled is not None else now
        self.queue_time.observe(max(0.0, scheduled - times.arrived))
        self.prefill_time.observe(max(0.0, now - scheduled))
        self.first_token_wait.observe(max(0.0, scheduled - times.arrived))

    def next_tokens(self, times: RequestTimes, count: int, now: float) -> None:
        """Record ``count`` further tokens; each gets an equal share of the time since the last token."""
        assert times.last_token is not None
        self.inter_token_latency.observe((now - times.last_token) / count, count)
        times.last_token = now

    def request_finished(self, times: RequestTimes, reason: str, prompt_tokens: int, tokens: int, now: float) -> None:
        """Record the end of a sequence; only ``stop`` and ``length`` count for the latencies."""
        self.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        self.e2e_latency.observe(now - times.arrived)
        self.prompt_tokens.observe(prompt_tokens)
        self.generation_tokens.observe(tokens)
        if times.first_token is None or times.last_token is None:
            return
        decode = times.last_token - times.first_token
        self.decode_time.observe(decode)
        scheduled = times.first_scheduled if times.first_scheduled is not None else times.first_token
        self.inference_time.observe(max(0.0, times.last_token - scheduled))
        if tokens > 1:
            self.time_per_output_token.observe(decode / (tokens - 1))
