"""The metrics of a server, and their exposition for Prometheus and for load reports."""

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire_common.contract.adapters_file import AdapterState
from quire_engine.api.adapters import AdapterService
from quire_engine.config import CacheOptions
from quire_engine.ipc.messages import Ready, Stats

_written: Callable[[float], str] = floatToGoString


class Histogram:
    """Counts by upper bound, which is inclusive as in Prometheus; the last count is of values above every bound."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Return the number of values up to each bound, and up to infinity."""
        return list(accumulate(self._counts))


def one_two_five(maximum: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 … up to ``maximum``."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > maximum:
                return tuple(bounds)
            bounds.append(float(digit * power))
        power *= 10


class HistogramText:
    """One histogram in Prometheus' text format: its lines are prepared once, and a scrape fills in the numbers.

    The text is equal to that of the client library, byte for byte, at a tenth of the time.
    """

    def __init__(self, name: str, help: str, labels: Mapping[str, str], histogram: Histogram) -> None:
        self._histogram = histogram
        own = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
        self._head = f"# HELP {name} {help}\n# TYPE {name} histogram\n"
        bounds = [*map(repr, histogram.bounds), "+Inf"]
        self._buckets = [f"{name}_bucket{{{_with_bound(labels, bound)}}} " for bound in bounds]
        self._count = f"{name}_count{{{own}}} "
        self._sum = f"{name}_sum{{{own}}} "

    def text(self) -> str:
        """Return the lines of the histogram."""
        counts = self._histogram.cumulative()
        parts = [self._head]
        for begin, count in zip(self._buckets, counts, strict=True):
            parts += (begin, _written(count), "\n")
        parts += (self._count, _written(counts[-1]), "\n")
        parts += (self._sum, _written(self._histogram.sum), "\n")
        return "".join(parts)


def _with_bound(labels: Mapping[str, str], bound: str) -> str:
    """Return the labels with ``le``, sorted by name as in the client library."""
    return ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted({**labels, "le": bound}.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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


_LABELS = ["model_name", "engine"]
_ENGINE = "0"


class AdapterCollector(Collector):
    """A collector of the metrics of a server that serves adapters."""

    def __init__(self, metrics: Metrics, adapters: AdapterService) -> None:
        self._metrics = metrics
        self._adapters = adapters
        self._values = [metrics.model_name, _ENGINE]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry needs no description in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._adapters.report()
        stats = self._metrics.engine.latest
        running = [] if stats is None else stats.gauges.running_adapters
        waiting = [] if stats is None else stats.gauges.waiting_adapters
        requests = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the time of the report in Unix seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        requests.add_metric([str(report.slots.total), self._names(running), self._names(waiting)], time.time())
        yield requests
        slots = GaugeMetricFamily("quire_adapter_slots", "Slots for adapters by state.", labels=[*_LABELS, "state"])
        for state, count in (("used", report.slots.used), ("free", report.slots.total - report.slots.used)):
            slots.add_metric([*self._values, state], count)
        yield slots
        states = GaugeMetricFamily("quire_adapters", "Adapters by state.", labels=[*_LABELS, "state"])
        found = Counter(adapter.state for adapter in report.adapters)
        for each in AdapterState:
            states.add_metric([*self._values, each.lower()], found[each])
        yield states
        loads = CounterMetricFamily("quire_adapter_loads", "Adapters copied into slots.", labels=_LABELS)
        loads.add_metric(self._values, self._metrics.engine.counters().get("adapter_loads", 0.0))
        yield loads

    def _names(self, adapters: Iterable[int]) -> str:
        return ",".join(sorted({name for number in adapters if (name := self._adapters.name_of(number)) is not None}))


class Exposition:
    """The page /metrics.

    ``certificate_expiry`` returns the expiry of the TLS certificate in Unix seconds, if any. ``most_drafts`` is the
    maximum number of draft tokens of a request in a step; 0 means no speculation. ``adapters`` is
    None where the server serves none.
    """

    def __init__(
        self,
        metrics: Metrics,
        cache: CacheOptions,
        now: Callable[[], float],
        certificate_expiry: Callable[[], float] | None = None,
        most_drafts: int = 0,
        adapters: AdapterService | None = None,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(metrics, cache, now, certificate_expiry, most_drafts, prefix_caching))
        if adapters is not None:
            self._registry.register(AdapterCollector(metrics, adapters))
        ProcessCollector(registry=self._registry)
        labels = dict(zip(_LABELS, (metrics.model_name, _ENGINE), strict=True))
        self._histograms = [
            HistogramText(name, help, labels, getattr(metrics, attribute)) for name, attribute, help in _HISTOGRAMS
        ]

    def text(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry) + "".join([each.text() for each in self._histograms]).encode()


class EngineCollector(Collector):
    """A collector of every metric that is not a histogram."""

    def __init__(
        self,
        metrics: Metrics,
        cache: CacheOptions,
        now: Callable[[], float],
        certificate_expiry: Callable[[], float] | None,
        most_drafts: int,
        prefix_caching: bool,
    ) -> None:
        self._metrics = metrics
        self._cache, self._prefix_caching = cache, prefix_caching
        self._now = now
        self._certificate_expiry = certificate_expiry
        self._most_drafts = most_drafts
        self._values = [metrics.model_name, _ENGINE]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry needs no description in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _labelled(self, family: Metric, rows: Iterable[tuple[list[str], float]]) -> Metric:
        for labels, value in rows:
            family.add_metric([*self._values, *labels], value)  # type: ignore[attr-defined]
        return family

    def _gauges(self) -> Iterator[Metric]:
        stats = self._metrics.engine.latest
        now = None if stats is None else stats.gauges
        running = now.num_running if now else 0
        waiting = now.num_waiting if now else 0
        yield self._gauge("vllm:num_requests_running", "Number of requests in the running batch.", running)
        yield self._gauge("vllm:num_requests_waiting", "Number of queued requests.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache usage, 0 to 1.", now.kv_usage if now else 0.0)
        used, cached, total = (now.blocks_used, now.blocks_cached, now.blocks_total) if now else (0, 0, 0)
        yield self._labelled(
            GaugeMetricFamily("quire_kv_blocks", "KV cache blocks by state.", labels=[*_LABELS, "state"]),
            [(["free"], total - used - cached), (["cached"], cached), (["used"], used)],
        )
        swapped, space = (now.swap_blocks_used, now.swap_blocks_total) if now else (0, 0)
        yield self._labelled(
            GaugeMetricFamily("quire_swap_blocks", "Host blocks for preempted requests.", labels=[*_LABELS, "state"]),
            [(["free"], space - swapped), (["used"], swapped)],
        )
        wasted = now.kv_slots_wasted if now else 0
        yield self._gauge("quire_kv_slots_wasted", "Empty token slots of running requests.", wasted)
        queued = now.queued_tokens if now else 0
        yield self._gauge("quire_queued_tokens", "Prompt tokens of queued requests.", queued)
        pending = self._metrics.pending_prefill_tokens()
        yield self._gauge(
            "quire_pending_prefill_tokens",
            "Prompt tokens still to be computed, less the expected prefix cache hits of queued requests.",
            pending,
        )
        if stats is not None:
            age = max(0.0, self._now() - stats.last_step_time)
            yield self._gauge("quire_last_step_age_seconds", "Seconds since the engine's last step ended.", age)
        if self._certificate_expiry is not None:
            yield self._gauge(
                "quire_tls_certificate_expiry_timestamp_seconds",
                "Expiry of the certificate for new connections, in Unix seconds.",
                self._certificate_expiry(),
            )
        ready = self._metrics.ready
        if ready is None:
            return
        yield self._gauge("quire_model_bytes", "Memory of the weights.", ready.model_bytes)
        yield self._gauge("quire_kv_cache_bytes", "Memory of the KV cache.", ready.kv_cache_bytes)
        yield self._gauge("quire_max_model_len", "Maximum tokens of a prompt with its answer.", ready.max_model_len)
        if ready.max_num_seqs is not None:
            yield self._gauge("quire_max_running_requests", "Limit of the running batch.", ready.max_num_seqs)
        yield self._cache_config(ready.num_blocks, ready.block_size, ready.dtype)
        yield self._labelled(
            GaugeMetricFamily("quire_startup_seconds", "Seconds of the start by phase.", labels=[*_LABELS, "phase"]),
            [([phase], seconds) for phase, seconds in ready.phase_seconds.items()],
        )

    def _cache_config(self, num_blocks: int, block_size: int, dtype: str) -> Metric:
        labels = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "cache_dtype": dtype,
            "gpu_memory_utilization": f"{self._cache.gpu_memory_utilization:g}",
            "enable_prefix_caching": str(self._prefix_caching),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "KV cache configuration.", labels=[*_LABELS, *labels])
        family.add_metric([*self._values, *labels.values()], 1)
        return family

    def _counters(self) -> Iterator[Metric]:
        metrics, counts = self._metrics, self._metrics.engine.counters()
        for name, key, help in _ENGINE_COUNTERS:
            yield self._counter(name, help, counts.get(key, 0.0))
        causes = {key.partition("/")[2]: value for key, value in counts.items() if key.startswith("preemptions/")}
        yield self._counter("vllm:num_preemptions", "Number of preemptions.", sum(causes.values()))
        yield self._labelled(
            CounterMetricFamily(
                "quire_preemptions", "Preemptions by kind and reason.", labels=[*_LABELS, "kind", "reason"]
            ),
            [(list(cause.partition(":")[::2]), count) for cause, count in causes.items()],
        )
        yield self._labelled(
            CounterMetricFamily(
                "quire_swapped_blocks", "Blocks copied to and from the swap space.", labels=[*_LABELS, "direction"]
            ),
            [([key.partition("/")[2]], value) for key, value in counts.items() if key.startswith("swapped_blocks/")],
        )
        if self._most_drafts:
            yield from self._drafts(counts)
        yield self._labelled(
            CounterMetricFamily("quire_step_seconds", "Seconds of the steps by part.", labels=[*_LABELS, "part"]),
            [([key.partition("/")[2]], value) for key, value in counts.items() if key.startswith("step_seconds/")],
        )
        yield self._labelled(
            CounterMetricFamily(
                "vllm:request_success", "Finished requests by reason.", labels=[*_LABELS, "finished_reason"]
            ),
            [([reason], count) for reason, count in metrics.finished.items()],
        )
        yield self._labelled(
            CounterMetricFamily("quire_rejected_requests", "Rejected requests by reason.", labels=[*_LABELS, "reason"]),
            [([reason], count) for reason, count in metrics.rejected.items()],
        )
        yield self._counter("quire_arrived_requests", "Number of accepted requests.", metrics.arrived_requests)
        yield self._counter("quire_arrived_prompt_tokens", "Prompt tokens accepted.", metrics.arrived_prompt_tokens)
        yield self._counter(
            "quire_uncached_prompt_tokens",
            "Prompt tokens of accepted requests, less the share of prefix cache hits so far.",
            metrics.uncached_prompt_tokens,
        )
        yield self._counter("quire_engine_restarts", "Number of replacements of the engine process.", metrics.restarts)

    def _drafts(self, counts: dict[str, float]) -> Iterator[Metric]:
        for name, key, help in _DRAFT_COUNTERS:
            yield self._counter(name, help, counts.get(key, 0.0))
        yield self._labelled(
            CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by their position among those of a request and step.",
                labels=[*_LABELS, "position"],
            ),
            [([str(place)], counts.get(f"accepted_at/{place}", 0.0)) for place in range(self._most_drafts)],
        )
        yield self._labelled(
            CounterMetricFamily(
                "quire_spec_decode_undrafted",
                "Decoding requests per step without draft tokens, by reason.",
                labels=[*_LABELS, "reason"],
            ),
            [([key.partition("/")[2]], value) for key, value in counts.items() if key.startswith("undrafted/")],
        )


_DRAFT_COUNTERS = (
    ("vllm:spec_decode_num_drafts", "num_drafts", "Verifications of draft tokens, one per request and step."),
    ("vllm:spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens verified."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted_tokens", "Draft tokens accepted."),
)

_ENGINE_COUNTERS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have run."),
    ("vllm:generation_tokens", "generation_tokens", "Sampled tokens."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("quire_steps", "steps", "Number of engine steps."),
    ("quire_scheduled_tokens", "scheduled_tokens", "Tokens computed, without rejected draft tokens."),
    ("quire_recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption."),
    ("quire_discarded_tokens", "discarded_tokens", "Tokens sampled after the end of their request."),
)

_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "time_to_first_token", "Seconds from arrival to the first token."),
    ("vllm:inter_token_latency_seconds", "inter_token_latency", "Seconds between the tokens of a request."),
    ("vllm:request_time_per_output_token_seconds", "time_per_output_token", "Mean seconds between a request's tokens."),
    ("vllm:e2e_request_latency_seconds", "e2e_latency", "Seconds from arrival to the end."),
    ("vllm:request_queue_time_seconds", "queue_time", "Seconds from arrival to the first step."),
    ("vllm:request_prefill_time_seconds", "prefill_time", "Seconds from the first step to the first token."),
    ("vllm:request_decode_time_seconds", "decode_time", "Seconds from the first token to the last."),
    ("vllm:request_inference_time_seconds", "inference_time", "Seconds from the first step to the last token."),
    ("vllm:iteration_tokens_total", "iteration_tokens", "Tokens computed in a step."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "Number of prompt tokens of a request."),
    ("vllm:request_generation_tokens", "generation_tokens", "Number of sampled tokens of a request."),
    (
        "quire_first_token_wait_seconds",
        "first_token_wait",
        "Seconds that the first token waited in addition to the request's own prefill.",
    ),
)


# --- the load report ---

LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"
"""ORCA's response header; a request with ``endpoint-load-metrics-format: JSON`` (or ``TEXT``) gets it."""


def load_report(format: str, stats: Stats | None) -> str | None:
    """Return the value of ORCA's load header; None for an unknown format, and while there is no report yet."""
    if stats is None:
        return None
    named = {
        "kv_cache_usage_perc": round(stats.gauges.kv_usage, 6),
        "num_requests_waiting": stats.gauges.num_waiting,
        "num_requests_running": stats.gauges.num_running,
    }
    match format.strip().upper():
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": named})
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case _:
            return None
