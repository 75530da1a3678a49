"""The engine serves every series that the autoscaler and the gateway read, with the expected meaning."""

from dataclasses import fields

import pytest

from quire_cli.inspection import load
from quire_common.contract import engine
from quire_common.metrics_page import points
from quire_engine.api.metrics import Exposition, Metrics, RequestTimes
from quire_engine.config import CacheOptions
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.ipc.messages import Ready, Stats
from quire_gateway import scrape
from quire_gateway.scrape import computed_tokens, parse_page
from quire_operator.autoscaling.engine_metrics import NAMES, SPECULATION_NAMES, sample_of
from quire_operator.autoscaling.observation import is_sane


@pytest.fixture(scope="module")
def page() -> str:
    """Return the metrics of an engine that has served a request."""
    return page_of(most_drafts=0)


def page_of(*, most_drafts: int) -> str:
    metrics = Metrics("chat", 4096)
    metrics.engine_ready(
        Ready(
            pid=1,
            model_bytes=1,
            kv_cache_bytes=1,
            num_blocks=100,
            block_size=16,
            max_model_len=4096,
            dtype="float32",
            weights="float32",
            phase_seconds={"weights": 1.0},
            max_num_seqs=64,
        )
    )
    metrics.arrived(prompt_tokens=40)
    metrics.engine_sent(prompt_tokens=40)
    metrics.engine_stats(
        Stats(
            time=1.0,
            last_step_time=1.0,
            gauges=Gauges(
                num_running=3,
                num_waiting=2,
                queued_tokens=77,
                parked_tokens=0,
                prefilling_tokens=30,
                blocks_total=100,
                blocks_used=25,
                blocks_cached=5,
                kv_usage=0.25,
                kv_slots_wasted=4,
                swap_blocks_total=0,
                swap_blocks_used=0,
            ),
            counters=Counters(
                steps=400,
                prompt_tokens=1000,
                generation_tokens=500,
                scheduled_tokens=1400,
                prefix_cache_queries=1000,
                prefix_cache_hits=100,
            ),
            seconds=StepSeconds(run=9.5, sample=0.5),
        )
    )
    times = RequestTimes(arrived=0.0, first_scheduled=0.7)
    metrics.first_token(times, 0.9)
    metrics.request_finished(times, "stop", prompt_tokens=40, tokens=1, now=0.9)
    return Exposition(metrics, CacheOptions(), lambda: 1.0, most_drafts=most_drafts).text().decode()


def test_engine_serves_every_series_that_the_autoscaler_reads(page):
    assert NAMES - {point.name for point in points(page, NAMES)} == SPECULATION_NAMES
    assert NAMES - {point.name for point in points(page_of(most_drafts=3), NAMES)} == set()


def test_engine_serves_every_series_that_quire_top_shows(page):
    assert load.NAMES - {point.name for point in points(page, load.NAMES)} == set()
    read = load.reading_of(points(page, load.NAMES), time=5.0)
    told = load.figures([load.growth(None, read)])
    assert (told.running, told.waiting, told.kv_percent) == (3, 2, 25)
    assert read.first_tokens.total == 1


def test_sample_equals_the_engine_state(page):
    sample = sample_of(points(page, NAMES), time=5.0)
    assert is_sane(sample)
    assert [field.name for field in fields(sample) if getattr(sample, field.name) is None] == []
    assert (sample.running, sample.waiting, sample.queued_prompt_tokens) == (3, 2, 77)
    assert (sample.kv_tokens_capacity, sample.kv_tokens_used) == (1600, 400)
    assert (sample.prompt_tokens, sample.cached_prompt_tokens, sample.generation_tokens) == (1000, 100, 500)
    assert (sample.steps, sample.busy_seconds) == (400, 10.0)
    assert (sample.arrived_requests, sample.arrived_prompt_tokens, sample.finished_requests) == (1, 40, 1)
    assert [histogram.total for histogram in sample.histograms] == [1, 1, 0], "one token has no gap"


def test_engine_serves_every_series_that_the_gateway_reads(page):
    assert scrape.NAMES - {point.name for point in points(page, scrape.NAMES)} == set()


def test_gateway_reads_the_same_figures(page):
    told = parse_page(page)
    names = (engine.RUNNING, engine.WAITING, engine.KV_USAGE, engine.FINISHED, engine.MAX_RUNNING, engine.CACHE_CONFIG)
    assert [told[name] for name in names] == [3, 2, 0.25, 1, 64, 1600]
    # 30 of a prompt in progress, 77 that wait, 40 that the engine has not seen: a tenth of the latter is cached.
    assert told[engine.PENDING_TOKENS] == pytest.approx(30 + (77 + 40) * 0.9)
    assert (computed_tokens(told), told[engine.STEP_SECONDS]) == (1400 - 500, 10.0)
    assert (told[engine.ARRIVED_REQUESTS], told[engine.ARRIVED_PROMPT_TOKENS]) == (1, 40)
