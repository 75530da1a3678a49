import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from quire_engine.api.metrics import TIME_TO_FIRST_TOKEN, Exposition, Histogram, HistogramText, Metrics, RequestTimes
from quire_engine.config import AccessOptions, CacheOptions
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.ipc.messages import Ready, Stats

Serving = Callable[..., Any]


def stats(**changed: Any) -> Stats:
    """Return a report in which every figure that ``changed`` does not name is 0."""

    def named(kind: type) -> dict[str, Any]:
        return {each.name: changed.pop(each.name) for each in fields(kind) if each.name in changed}

    zeros = {each.name: 0 for each in fields(Gauges) if each.default_factory is MISSING}
    gauges, counters = Gauges(**{**zeros, **named(Gauges)}), Counters(**named(Counters))
    report = Stats(time=1.0, last_step_time=1.0, gauges=gauges, counters=counters, seconds=StepSeconds())
    return structs.replace(report, **changed)


def ready(pid: int = 1) -> Ready:
    return Ready(
        pid=pid,
        model_bytes=1,
        kv_cache_bytes=1,
        num_blocks=64,
        block_size=16,
        max_model_len=512,
        dtype="float32",
        weights="float32",
        phase_seconds={"import": 0.5},
    )


def scraped(metrics: Metrics, **options: int) -> dict[str, dict[str, float]]:
    """Return sample name → labels (without those of all samples) → value."""
    text = Exposition(metrics, CacheOptions(), lambda: 3.0, **options).text().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_metric_names_types_and_labels_equal_those_of_vllm() -> None:
    wanted = {}
    for line in (Path(__file__).parent / "vllm_metrics.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, kind, labels = line.split()
            wanted[name] = (kind, set(labels.split(",")))
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_stats(stats())
    text = Exposition(metrics, CacheOptions(), time.monotonic, most_drafts=2).text().decode()
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ")}
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            for suffix in ("_bucket", "_sum", "_count"):
                name = name.removesuffix(suffix) if kinds.get(name.removesuffix(suffix)) == "histogram" else name
            labels.setdefault(name, set()).update(sample.labels)
    found = {name: (kind, labels[name] - {"le"}) for name, kind in kinds.items() if name.startswith("vllm:")}
    assert found == wanted
    assert {family.partition("{")[0].split("_")[0] for family in kinds} == {"vllm:num", "vllm:kv", "vllm:cache"} | {
        name.split("_")[0] for name in kinds
    }


def test_drafts_are_counted_by_position_and_by_reason() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    counters = {"num_drafts": 5, "draft_tokens": 9, "accepted_tokens": 6, "accepted_by_position": [4, 2]}
    metrics.engine_stats(stats(**counters, undrafted_sequences={"cost": 3, "grammar": 1}))
    metrics.engine_ready(ready(2))  # a replacement continues the counters
    metrics.engine_stats(stats(**counters))
    found = scraped(metrics, most_drafts=3)
    assert found["vllm:spec_decode_num_drafts_total"] == {"": 10.0}
    assert found["vllm:spec_decode_num_draft_tokens_total"] == {"": 18.0}
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == {"": 12.0}
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == {
        "position=0": 8.0,
        "position=1": 4.0,
        "position=2": 0.0,
    }
    assert found["quire_spec_decode_undrafted_total"] == {"reason=cost": 3.0, "reason=grammar": 1.0}
    assert not [name for name in scraped(metrics) if "spec_decode" in name]


_BUCKETS = {
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0": {
        *("vllm:time_to_first_token_seconds", "quire_first_token_wait_seconds"),
    },
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0": {
        *("vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"),
    },
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0": {
        *("vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"),
        *("vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds"),
    },
    "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0": {"vllm:iteration_tokens_total"},
    "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0": {"vllm:request_prompt_tokens", "vllm:request_generation_tokens"},
}


def test_histograms_have_the_buckets_of_the_dashboards() -> None:
    text = Exposition(Metrics("m", 500), CacheOptions(), time.monotonic).text().decode()
    bounds: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(sample.name.removesuffix("_bucket"), []).append(sample.labels["le"])
    found: dict[str, set[str]] = {}
    for name, own in bounds.items():
        assert own.pop() == "+Inf"
        found.setdefault(" ".join(own), set()).add(name)
    assert found == _BUCKETS


async def test_rejected_requests_are_counted_by_reason(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("requests_per_minute=3 plain-key-1\n")
    async with serving("ok", access=AccessOptions(api_key_file=tmp_path / "keys")) as server:
        rejected = server.context.metrics.rejected
        await server.complete()
        assert rejected == {"unauthorized": 1}
        server.http.headers["authorization"] = "Bearer plain-key-1"
        server.engine.ready, server.engine.state = None, "starting"
        await server.complete()
        server.context.lifecycle.begin_drain()
        await server.complete()
        await server.complete(colour=1)  # it is draining as well
        await server.complete()
        assert rejected == {"unauthorized": 1, "no_engine": 1, "draining": 2, "key_limit": 1}
        assert 'reason="key_limit"} 1.0' in (await server.http.get("/metrics")).text


@pytest.mark.parametrize(
    ("values", "cumulative"), [([], [0, 0, 0]), ([0.5, 1.0], [2, 2, 2]), ([1.5, 2.0, 9.0], [0, 2, 3])]
)
def test_a_histogram_counts_up_to_and_with_its_bounds(values: list[float], cumulative: list[int]) -> None:
    histogram = Histogram((1.0, 2.0))
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == cumulative and histogram.sum == sum(values)


class OneHistogram(Collector):
    """The histogram in the client library's format."""

    def __init__(self, labels: dict[str, str], histogram: Histogram) -> None:
        self._labels = labels
        self._histogram = histogram

    def collect(self) -> list[HistogramMetricFamily]:
        counts = self._histogram.cumulative()
        buckets = [*zip(map(repr, self._histogram.bounds), counts, strict=False), ("+Inf", counts[-1])]
        family = HistogramMetricFamily("vllm:x_seconds", "What it is.", labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, self._histogram.sum)
        return [family]


@given(
    st.text(max_size=20).filter(lambda text: text.isprintable() or text in '\n"\\'),
    st.lists(st.tuples(st.floats(0, 1e12), st.integers(1, 10**8)), max_size=8),
)
def test_a_histogram_is_written_as_the_client_library_writes_it(name: str, observed: list[tuple[float, int]]) -> None:
    labels, histogram = {"model_name": name, "engine": "0"}, Histogram(TIME_TO_FIRST_TOKEN)
    for value, times in observed:
        histogram.observe(value, times)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OneHistogram(labels, histogram))
    text = HistogramText("vllm:x_seconds", "What it is.", labels, histogram).text()
    assert text == generate_latest(registry).decode()


def test_scrape_stays_within_two_milliseconds() -> None:
    metrics = Metrics("m", 2**17)
    metrics.engine_ready(ready())
    metrics.engine_stats(stats(num_running=1000, preemptions={"recompute:no_free_blocks": 2}))
    exposition = Exposition(metrics, CacheOptions(), time.monotonic)
    taken = []
    for _ in range(50):
        began = time.thread_time()
        exposition.text()
        taken.append(time.thread_time() - began)
    assert sorted(taken)[5] < 0.002  # its cost if no other process uses the core's caches


def test_gauges_show_the_latest_engine_report() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_stats(
        stats(
            num_running=3,
            num_waiting=2,
            queued_tokens=70,
            blocks_total=10,
            blocks_used=4,
            blocks_cached=5,
            kv_usage=0.4,
            kv_slots_wasted=6,
            swap_blocks_total=8,
            swap_blocks_used=3,
        )
    )
    found = scraped(metrics)
    assert found["vllm:num_requests_running"] == {"": 3} and found["vllm:num_requests_waiting"] == {"": 2}
    assert found["vllm:kv_cache_usage_perc"] == {"": 0.4} and found["quire_queued_tokens"] == {"": 70}
    assert found["quire_kv_blocks"] == {"state=free": 1, "state=cached": 5, "state=used": 4}
    assert found["quire_swap_blocks"] == {"state=free": 5, "state=used": 3}
    assert found["quire_kv_slots_wasted"] == {"": 6} and found["quire_last_step_age_seconds"] == {"": 2}


def test_lost_engine_zeroes_gauges_and_keeps_counters() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_stats(stats(num_running=3, num_waiting=2, kv_usage=0.4, prompt_tokens=100))
    metrics.engine_lost()
    found = scraped(metrics)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == {"": 0}
    assert found["vllm:kv_cache_usage_perc"] == {"": 0} and "quire_last_step_age_seconds" not in found
    assert found["vllm:prompt_tokens_total"] == {"": 100}
    metrics.engine_ready(ready(pid=2))
    assert scraped(metrics)["vllm:prompt_tokens_total"] == {"": 100}


def test_counters_continue_after_an_engine_restart() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_stats(
        stats(
            prompt_tokens=100,
            preemptions={"recompute:forced": 2},
            seconds=StepSeconds(run=1.5),
            swapped_out_blocks=5,
            recomputed_tokens=30,
        )
    )
    metrics.engine_ready(ready(pid=2))
    assert scraped(metrics)["vllm:prompt_tokens_total"] == {"": 100}
    metrics.engine_stats(
        stats(prompt_tokens=7, preemptions={"recompute:forced": 1, "swap:cheaper": 1}, swapped_in_blocks=4)
    )
    found = scraped(metrics)
    assert found["vllm:prompt_tokens_total"] == {"": 107} and found["vllm:num_preemptions_total"] == {"": 4}
    assert found["quire_preemptions_total"] == {
        "kind=recompute,reason=forced": 3,
        "kind=swap,reason=cheaper": 1,
    }
    assert found["quire_swapped_blocks_total"] == {"direction=out": 5, "direction=in": 4}
    assert found["quire_recomputed_tokens_total"] == {"": 30}
    assert found["quire_step_seconds_total"]["part=run"] == 1.5 and found["quire_engine_restarts_total"] == {"": 1}


def test_steps_between_reports_count_with_their_mean_size() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_stats(stats(steps=2, scheduled_tokens=10))
    metrics.engine_stats(stats(steps=3, scheduled_tokens=110))
    metrics.engine_stats(stats(steps=3, scheduled_tokens=110))
    assert metrics.iteration_tokens.cumulative()[:6] == [0, 2, 2, 2, 2, 3] and metrics.iteration_tokens.sum == 110


def test_a_requests_times_add_up() -> None:
    metrics = Metrics("m", 512)
    times = RequestTimes(arrived=10.0, first_scheduled=11.0)
    metrics.first_token(times, 13.0)
    metrics.next_tokens(times, 2, 14.0)
    metrics.next_tokens(times, 1, 16.0)
    metrics.request_finished(times, "stop", 20, 4, 16.5)
    sums = {
        name: getattr(metrics, name).sum
        for name in (
            *("time_to_first_token", "queue_time", "first_token_wait", "prefill_time", "inter_token_latency"),
            *("decode_time", "inference_time", "e2e_latency", "time_per_output_token"),
        )
    }
    assert sums == {
        "time_to_first_token": 3.0,
        "queue_time": 1.0,
        "first_token_wait": 1.0,
        "prefill_time": 2.0,
        "inter_token_latency": 3.0,
        "decode_time": 3.0,
        "inference_time": 5.0,
        "e2e_latency": 6.5,
        "time_per_output_token": 1.0,
    }
    assert metrics.inter_token_latency.cumulative()[-1] == 3


def test_an_ended_request_counts_as_no_success_time() -> None:
    metrics = Metrics("m", 512)
    metrics.request_finished(RequestTimes(arrived=1.0), "abort", 5, 0, 2.0)
    assert metrics.finished["abort"] == 1 and metrics.e2e_latency.cumulative()[-1] == 0


def test_arriving_tokens_exclude_the_cached_share() -> None:
    metrics = Metrics("m", 512)
    metrics.arrived(100)
    metrics.engine_stats(stats(prefix_cache_queries=100, prefix_cache_hits=75))
    metrics.arrived(100)
    found = scraped(metrics)
    assert found["quire_arrived_prompt_tokens_total"] == {"": 200}
    assert found["quire_uncached_prompt_tokens_total"] == {"": 125} and found["quire_arrived_requests_total"] == {"": 2}


def pending(metrics: Metrics) -> float:
    return scraped(metrics)["quire_pending_prefill_tokens"][""]


def test_pending_prefill_counts_running_queued_and_sent_tokens() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_sent(100)
    assert pending(metrics) == 100
    metrics.engine_stats(stats(received_prompt_tokens=100, prefilling_tokens=30, queued_tokens=50, parked_tokens=20))
    assert pending(metrics) == 60
    metrics.engine_sent(400)
    assert pending(metrics) == 460
    metrics.engine_stats(stats(received_prompt_tokens=500))
    assert pending(metrics) == 0


def test_expected_prefix_hits_reduce_queued_prefill_tokens() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_sent(300)
    metrics.engine_stats(
        stats(
            received_prompt_tokens=100,
            prefilling_tokens=30,
            queued_tokens=40,
            prefix_cache_queries=100,
            prefix_cache_hits=75,
        )
    )
    assert pending(metrics) == 30 + (40 + 200) / 4


def test_dead_engine_has_no_pending_prefill() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(ready())
    metrics.engine_sent(300)
    metrics.engine_lost()
    assert pending(metrics) == 0
    metrics.engine_ready(ready(pid=2))
    metrics.engine_sent(7)
    assert pending(metrics) == 7


async def test_scrape_counts_served_requests_and_tokens(serving: Serving) -> None:
    async with serving("Hello") as server:
        await server.chat()
        await server.complete(n=2, max_tokens=3)
        response = await server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        samples = {
            (sample.name, sample.labels.get("finished_reason")): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.labels.get("le") in (None, "+Inf")
        }
        assert samples[("vllm:request_success_total", "stop")] == 1
        assert samples[("vllm:request_success_total", "length")] == 2
        assert samples[("vllm:time_to_first_token_seconds_count", None)] == 3
        assert samples[("vllm:request_generation_tokens_sum", None)] == 12
        assert samples[("process_resident_memory_bytes", None)] > 0


@pytest.mark.parametrize(
    ("format", "report"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2, "
                 "named_metrics.num_requests_running=3"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2, '
                 '"num_requests_running": 3}}'),
        ("BIN", None),
        (None, None),
    ],
)  # fmt: skip
async def test_load_is_reported_in_the_requested_orca_format(
    serving: Serving, format: str | None, report: str | None
) -> None:
    async with serving("ok") as server:
        server.context.metrics.engine_stats(stats(kv_usage=0.25, num_waiting=2, num_running=3))
        headers = {} if format is None else {"endpoint-load-metrics-format": format}
        body = {"model": "demo", "prompt": "x", "stream": True}
        response = await server.http.post("/v1/completions", json=body, headers=headers)
        assert response.headers.get("endpoint-load-metrics") == report


PROMETHEUS_ACCEPTS = {
    "2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3.5": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}


@pytest.mark.parametrize("accept", PROMETHEUS_ACCEPTS.values(), ids=PROMETHEUS_ACCEPTS.keys())
async def test_metric_names_keep_the_colons_of_vllm(serving: Serving, accept: str) -> None:
    async with serving("Hello") as server:
        await server.chat()
        reply = await server.http.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nvllm:num_requests_running{" in reply.text
    assert "vllm_" not in reply.text
