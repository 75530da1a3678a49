"""Metrics read directly from replicas and gateways over HTTP."""

import asyncio
import math

import pytest

from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase
from quire_operator.autoscaling.scrape import NoPage, Scraper

PAGE = """\
# HELP vllm:num_requests_running Requests in the running batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 3.0
vllm:num_requests_waiting{engine="0",model_name="chat"} 2
vllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="float32",engine="0",num_gpu_blocks="100"} 1
quire_queued_tokens{engine="0"} 77
vllm:prompt_tokens_total{engine="0"} 1000
vllm:generation_tokens_total{engine="0"} 500
vllm:spec_decode_num_draft_tokens_total{engine="0"} 90
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 60
vllm:prefix_cache_hits_total{engine="0"} 100
vllm:request_success_total{engine="0",finished_reason="stop"} 8
vllm:request_success_total{engine="0",finished_reason="length"} 2
quire_steps_total{engine="0"} 400
quire_step_seconds_total{engine="0",part="run"} 9.5
quire_step_seconds_total{engine="0",part="sample"} 0.5
quire_arrived_requests_total{engine="0"} 15
quire_uncached_prompt_tokens_total{engine="0"} 1400
quire_first_token_wait_seconds_bucket{engine="0",le="0.5"} 6
quire_first_token_wait_seconds_bucket{engine="0",le="1.0"} 8
quire_first_token_wait_seconds_bucket{engine="0",le="+Inf"} 10
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf"} nonsense
"""


class SetClock:
    def __call__(self) -> float:
        return 123.0


def replica(name: str, *, phase: ReplicaPhase = ReplicaPhase.READY, url: str | None = "") -> ReplicaAddress:
    return ReplicaAddress(name=name, phase=phase, metrics_url=f"http://{name}/metrics" if url == "" else url)


def host_of(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/metrics")


def scraper(read, **options) -> Scraper:
    return Scraper(clock=SetClock(), read=read, **options)


@pytest.fixture
def read():
    """Return a function that scrapes one replica with the given page."""

    async def one(page: str | bytes):
        async def give(url: str) -> bytes:
            return page.encode() if isinstance(page, str) else page

        return (await scraper(give).samples([replica("a")])).get("a")

    return one


async def test_page_becomes_a_sample(read):
    sample = await read(PAGE)
    assert sample.time == 123.0
    assert (sample.running, sample.waiting, sample.queued_prompt_tokens) == (3, 2, 77)
    assert (sample.kv_tokens_capacity, sample.kv_tokens_used) == (1600, 400)
    assert (sample.prompt_tokens, sample.cached_prompt_tokens, sample.generation_tokens) == (1000, 100, 500)
    assert (sample.finished_requests, sample.steps, sample.busy_seconds) == (10, 400, 10.0)
    assert sample.rejected_drafts == 30
    assert (sample.arrived_requests, sample.arrived_prompt_tokens) == (15, 1400)
    assert sample.first_token_waits.bounds == (0.5, 1.0, math.inf)
    assert sample.first_token_waits.counts == (6, 8, 10)


async def test_engine_without_own_metrics_is_read_by_vllm_names(read):
    lines = [line for line in PAGE.splitlines() if not line.startswith("quire_")]
    sample = await read("\n".join(lines) + "\n")
    assert (sample.running, sample.arrived_requests, sample.busy_seconds, sample.first_token_waits) == (3, *[None] * 3)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>not found</html>",
        PAGE.replace("vllm:num_requests_running", "x"),
        PAGE.replace('num_gpu_blocks="100"', 'num_gpu_blocks="None"'),
        PAGE.replace("0.25", "a quarter"),
        b"\xff\xfe\x00",
    ],
    ids=["empty", "html", "no gauge", "no blocks", "no number", "no text"],
)
async def test_incomplete_metrics_page_is_no_sample(read, page):
    assert await read(page) is None


async def test_nan_is_passed_to_the_autoscaler_which_rejects_it(read):
    assert math.isnan((await read(PAGE.replace("} 3.0", "} NaN"))).running)


async def test_unanswered_scrape_is_counted_and_logged_once(caplog):
    broken, reasons = True, []

    async def answer(url: str) -> bytes:
        if not broken or host_of(url) == "good":
            return PAGE.encode()
        if host_of(url) == "strange":
            return b"<html>"
        raise NoPage("connection refused", reason="unreachable")

    subject = scraper(answer, failed=reasons.append)
    replicas = [replica(name) for name in ("good", "dead", "strange")]
    for _ in range(3):
        assert set(await subject.samples(replicas)) == {"good"}
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert sorted(reasons) == ["bad_answer"] * 3 + ["unreachable"] * 3
    broken = False
    with caplog.at_level("INFO"):
        assert set(await subject.samples(replicas)) == {"good", "dead", "strange"}
    assert caplog.text.count("again") == 2


async def test_hundreds_of_silent_replicas_delay_no_tick(monkeypatch):
    """Their node is unreachable, and each blocks its place for as long as it may.

    Those that answered before come first.
    """
    monkeypatch.setattr("quire_operator.autoscaling.scrape._ROUND_SECONDS", 0.1)
    asked, reasons = [], []

    async def answer(url: str) -> bytes:
        asked.append(host_of(url))
        if host_of(url).startswith("dead"):
            await asyncio.Event().wait()
        return PAGE.encode()

    subject = scraper(answer, failed=reasons.append)
    dead, good = [replica(f"dead-{n}") for n in range(300)], [replica(f"good-{n}") for n in range(50)]
    await subject.samples(dead)
    assert reasons == ["timeout"] * 300
    asked.clear()
    assert set(await subject.samples([*dead, *good])) == {r.name for r in good}
    assert asked[:50] == [r.name for r in good]


async def test_only_reachable_replicas_are_scraped():
    asked = []

    async def answer(url: str) -> bytes:
        asked.append(host_of(url))
        return PAGE.encode()

    await scraper(answer).samples(
        [
            replica("pending", phase=ReplicaPhase.PENDING, url=None),
            replica("loading", phase=ReplicaPhase.LOADING),
            replica("draining", phase=ReplicaPhase.DRAINING),
            replica("ready"),
        ]
    )
    assert sorted(asked) == ["draining", "ready"]
