"""Metrics read straight from replicas and gateways over HTTP."""

import asyncio
import math

import httpx
import pytest

from quire_operator.adapters.scrape import Scraper
from quire_operator.domain.observation import ReplicaPhase
from quire_operator.ports import ReplicaAddress

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
    def now(self) -> float:
        return 123.0


def replica(name: str, *, phase: ReplicaPhase = ReplicaPhase.READY, url: str | None = "") -> ReplicaAddress:
    return ReplicaAddress(name=name, phase=phase, metrics_url=f"http://{name}/metrics" if url == "" else url)


def scraper(handler, **options) -> Scraper:
    client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return Scraper(clock=SetClock(), client=client, **options)


@pytest.fixture
async def read():
    """Scrapes one replica that answers with the given page."""
    opened = []

    async def one(page: str | bytes):
        subject = scraper(lambda request: httpx.Response(200, content=page))
        opened.append(subject)
        return (await subject.samples([replica("a")])).get("a")

    yield one
    for subject in opened:
        await subject.aclose()


async def test_page_becomes_a_sample(read):
    sample = await read(PAGE)
    assert sample.time == 123.0
    assert (sample.running, sample.waiting, sample.queued_prompt_tokens) == (3, 2, 77)
    assert (sample.kv_tokens_capacity, sample.kv_tokens_used) == (1600, 400)
    assert (sample.prompt_tokens, sample.cached_prompt_tokens, sample.generation_tokens) == (1000, 100, 500)
    assert (sample.finished_requests, sample.steps, sample.busy_seconds) == (10, 400, 10.0)
    assert (sample.arrived_requests, sample.arrived_prompt_tokens) == (15, 1400)
    assert sample.first_token_waits.bounds == (0.5, 1.0, math.inf)
    assert sample.first_token_waits.counts == (6, 8, 10)


async def test_engine_without_our_own_metrics_is_read_as_far_as_it_goes(read):
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
        b"vllm:num_requests_running 1\n" * 400_000,
    ],
    ids=["empty", "html", "no gauge", "no blocks", "no number", "no text", "endless"],
)
async def test_page_that_does_not_tell_is_no_sample(read, page):
    assert await read(page) is None


async def test_not_a_number_is_passed_on_for_the_autoscaler_to_refuse(read):
    assert math.isnan((await read(PAGE.replace("} 3.0", "} NaN"))).running)


async def test_what_does_not_answer_is_absent_and_said_once(caplog):
    broken = True

    def answer(request):
        if request.url.host == "good" or not broken:
            return httpx.Response(200, text=PAGE)
        if request.url.host == "dead":
            raise httpx.ConnectError("connection refused")
        return httpx.Response(503)

    subject = scraper(answer)
    replicas = [replica(name) for name in ("good", "dead", "failing")]
    for _ in range(3):
        assert set(await subject.samples(replicas)) == {"good"}
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    broken = False
    with caplog.at_level("INFO"):
        assert set(await subject.samples(replicas)) == {"good", "dead", "failing"}
    assert caplog.text.count("again") == 2
    await subject.aclose()


async def test_slow_replica_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr("quire_operator.adapters.scrape._TIMEOUT_SECONDS", 0.05)

    async def answer(request):
        if request.url.host == "slow":
            await asyncio.Event().wait()
        return httpx.Response(200, text=PAGE)

    subject = scraper(answer)
    assert set(await subject.samples([replica("slow"), replica("quick")])) == {"quick"}
    await subject.aclose()


async def test_only_replicas_that_can_answer_are_asked():
    asked = []

    def answer(request):
        asked.append(request.url.host)
        return httpx.Response(200, text=PAGE)

    subject = scraper(answer)
    await subject.samples(
        [
            replica("pending", phase=ReplicaPhase.PENDING, url=None),
            replica("loading", phase=ReplicaPhase.LOADING),
            replica("draining", phase=ReplicaPhase.DRAINING),
            replica("ready"),
        ]
    )
    assert sorted(asked) == ["draining", "ready"]
    await subject.aclose()
