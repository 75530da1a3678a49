"""/metrics as text: a Prometheus collector over ``Metrics``, in the names, labels and buckets dashboards know.

Endpoint pickers scrape many times a second. Three lines in four are buckets of histograms, so these are written by
``histogram_text``, whose lines are ready but for their numbers; the rest is written by the client library.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_engine.config import CacheOptions
from quire_engine.ipc.messages import Stats
from quire_engine.server.observability.histogram import HistogramText
from quire_engine.server.observability.metrics import Metrics

_LABELS = ["model_name", "engine"]
_ENGINE = "0"


class Exposition:
    """``certificate_expiry`` is asked for where the server speaks TLS."""

    def __init__(
        self,
        metrics: Metrics,
        cache: CacheOptions,
        now: Callable[[], float],
        certificate_expiry: Callable[[], float] | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(metrics, cache, now, certificate_expiry))
        ProcessCollector(registry=self._registry)
        labels = dict(zip(_LABELS, (metrics.model_name, _ENGINE), strict=True))
        self._histograms = [
            HistogramText(name, help, labels, getattr(metrics, attribute)) for name, attribute, help in _HISTOGRAMS
        ]

    def text(self) -> bytes:
        """All of it, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry) + "".join([each.text() for each in self._histograms]).encode()


class EngineCollector(Collector):
    def __init__(
        self,
        metrics: Metrics,
        cache: CacheOptions,
        now: Callable[[], float],
        certificate_expiry: Callable[[], float] | None,
    ) -> None:
        self._metrics = metrics
        self._cache = cache
        self._now = now
        self._certificate_expiry = certificate_expiry
        self._values = [metrics.model_name, _ENGINE]

    def describe(self) -> Iterable[Metric]:
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
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to run.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is full.", now.kv_usage if now else 0.0)
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
        yield self._gauge("quire_kv_slots_wasted", "Token slots of running requests that hold no token.", wasted)
        queued = now.queued_tokens if now else 0
        yield self._gauge("quire_queued_tokens", "Prompt tokens of requests that wait to run.", queued)
        pending = self._metrics.pending_prefill_tokens()
        yield self._gauge(
            "quire_pending_prefill_tokens",
            "Prompt tokens still to be computed, less what the prefix cache is expected to hold of those that wait.",
            pending,
        )
        if stats is not None:
            age = max(0.0, self._now() - stats.last_step_time)
            yield self._gauge("quire_last_step_age_seconds", "Since the engine's last step ended.", age)
        if self._certificate_expiry is not None:
            yield self._gauge(
                "quire_tls_certificate_expiry_timestamp_seconds",
                "When the certificate that new connections get ends, in Unix time.",
                self._certificate_expiry(),
            )
        ready = self._metrics.ready
        if ready is None:
            return
        yield self._gauge("quire_model_bytes", "Weights as they lie in memory.", ready.model_bytes)
        yield self._gauge("quire_kv_cache_bytes", "Memory of the KV cache.", ready.kv_cache_bytes)
        if ready.max_num_seqs is not None:
            yield self._gauge("quire_max_running_requests", "Most requests in the running batch.", ready.max_num_seqs)
        yield self._cache_config(ready.num_blocks, ready.block_size, ready.dtype)
        yield self._labelled(
            GaugeMetricFamily("quire_startup_seconds", "Start-up of the engine by phase.", labels=[*_LABELS, "phase"]),
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
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=[*_LABELS, *labels])
        family.add_metric([*self._values, *labels.values()], 1)
        return family

    def _counters(self) -> Iterator[Metric]:
        metrics, counts = self._metrics, self._metrics.engine.counters()
        for name, key, help in _ENGINE_COUNTERS:
            yield self._counter(name, help, counts.get(key, 0.0))
        causes = {key.partition("/")[2]: value for key, value in counts.items() if key.startswith("preemptions/")}
        yield self._counter("vllm:num_preemptions", "Requests that lost their place.", sum(causes.values()))
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
        yield self._labelled(
            CounterMetricFamily("quire_step_seconds", "Time in steps by part.", labels=[*_LABELS, "part"]),
            [([key.partition("/")[2]], value) for key, value in counts.items() if key.startswith("step_seconds/")],
        )
        yield self._labelled(
            CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=[*_LABELS, "finished_reason"]),
            [([reason], count) for reason, count in metrics.finished.items()],
        )
        yield self._labelled(
            CounterMetricFamily("quire_rejected_requests", "Requests not taken.", labels=[*_LABELS, "reason"]),
            [([reason], count) for reason, count in metrics.rejected.items()],
        )
        yield self._counter("quire_arrived_requests", "Requests that came in.", metrics.arrived_requests)
        yield self._counter("quire_arrived_prompt_tokens", "Their prompt tokens.", metrics.arrived_prompt_tokens)
        yield self._counter(
            "quire_uncached_prompt_tokens",
            "Prompt tokens that came in, less the share that the prefix cache held so far.",
            metrics.uncached_prompt_tokens,
        )
        yield self._counter("quire_engine_restarts", "Times the engine process was replaced.", metrics.restarts)


_ENGINE_COUNTERS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of requests that ran."),
    ("vllm:generation_tokens", "generation_tokens", "Tokens drawn."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found there."),
    ("quire_steps", "steps", "Steps of the engine."),
    ("quire_scheduled_tokens", "scheduled_tokens", "Tokens computed."),
    ("quire_recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption."),
    ("quire_discarded_tokens", "discarded_tokens", "Tokens drawn after their request had ended."),
)

_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token."),
    ("vllm:inter_token_latency_seconds", "inter_token_latency", "Between tokens of a request."),
    ("vllm:request_time_per_output_token_seconds", "time_per_output_token", "A request's mean time between tokens."),
    ("vllm:e2e_request_latency_seconds", "e2e_latency", "From arrival to the end."),
    ("vllm:request_queue_time_seconds", "queue_time", "From arrival to the first step."),
    ("vllm:request_prefill_time_seconds", "prefill_time", "From the first step to the first token."),
    ("vllm:request_decode_time_seconds", "decode_time", "From the first token to the last."),
    ("vllm:request_inference_time_seconds", "inference_time", "From the first step to the last token."),
    ("vllm:iteration_tokens_total", "iteration_tokens", "Tokens computed in a step."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "Prompt tokens of a request."),
    ("vllm:request_generation_tokens", "generation_tokens", "Tokens drawn for a request."),
    (
        "quire_first_token_wait_seconds",
        "first_token_wait",
        "What the first token waited beyond the request's own prefill.",
    ),
)


# --- the load report ---

ASKED_BY = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"
"""ORCA's header: a request with ``endpoint-load-metrics-format: JSON`` (or ``TEXT``) is answered with it."""


def load_report(format: str, stats: Stats | None) -> str | None:
    """The header's value; None for a format nobody knows, and while the engine has told nothing."""
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
