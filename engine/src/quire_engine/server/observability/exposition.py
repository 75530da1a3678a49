"""/metrics as text: a Prometheus collector over ``Metrics``, with the names, labels and buckets of vLLM's dashboards.

Endpoint pickers scrape many times per second. Three of four lines are histogram buckets, so ``HistogramText`` writes
these, with everything but the numbers prepared; the client library writes the rest.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_engine.config import CacheOptions
from quire_engine.ipc.messages import Stats
from quire_engine.server.adapters.service import AdapterService
from quire_engine.server.observability.adapter_collector import AdapterCollector
from quire_engine.server.observability.histogram import HistogramText
from quire_engine.server.observability.metrics import Metrics

_LABELS = ["model_name", "engine"]
_ENGINE = "0"


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
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(metrics, cache, now, certificate_expiry, most_drafts))
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
    ) -> None:
        self._metrics = metrics
        self._cache = cache
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
            "enable_prefix_caching": str(self._cache.enable_prefix_caching),
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
