"""The autoscaler's queries against a real Prometheus: the shape of answers, their age, loss and return."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from quire_operator.autoscaling.engine_metrics import PrometheusOptions
from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase, ReplicaSample
from quire_operator.autoscaling.prometheus import Prometheus
from quire_operator.autoscaling.supply import SAMPLE_SECONDS


@pytest.fixture
async def prometheus(server):
    adapter = Prometheus(PrometheusOptions(url=server.url), clock=time.time)
    yield adapter
    await adapter.aclose()


def address(name: str, engine) -> ReplicaAddress:
    url = f"http://{engine.address}/metrics"
    return ReplicaAddress(name=name, phase=ReplicaPhase.READY, metrics_url=url, by_prometheus=True)


async def until(condition: Callable[[], Awaitable[object]]) -> object:
    async with asyncio.timeout(120):
        while not (value := await condition()):
            await asyncio.sleep(0.05)
        return value


async def test_replica_is_read_by_its_pod_and_by_its_address(server, prometheus, engine):
    replica = await engine()
    replica.running, replica.waiting, replica.generated = 3, 2, 500

    async def sample(name: str) -> ReplicaSample | None:
        return (await prometheus.samples([address(name, replica)])).get(name)

    server.show(replica.address)
    seen = await until(lambda: sample("chat-0"))
    assert (seen.running, seen.waiting, seen.generation_tokens) == (3, 2, 500)
    assert (seen.kv_tokens_capacity, seen.kv_tokens_used) == (1600, 800)
    assert seen.first_token_waits.counts == (8, 10)
    assert 0 <= time.time() - seen.time < SAMPLE_SECONDS
    server.show(replica.address, namespace="prod", pod="a")
    assert (await until(lambda: sample("prod/a"))).running == 3

    async def forgotten() -> bool:
        return await sample("chat-0") is None

    assert await until(forgotten), "by its address it is known no more: it has a pod's name"
    # Two jobs scrape it, as with a PodMonitor and annotations together.
    server.show(replica.address, replica.address.replace("127.0.0.1", "localhost"), namespace="prod", pod="a")

    async def scraped_twice() -> bool:
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.get(f"{server.url}/api/v1/query", params={"query": "count(vllm:num_requests_running)"})
        return [each["value"][1] for each in reply.json()["data"]["result"]] == ["2"]

    await until(scraped_twice)
    assert (await sample("prod/a")).running == 3


async def test_restart_never_reports_old_figures_as_new(server, prometheus, engine):
    replica = await engine()
    replica.running = 5
    server.show(replica.address, namespace="prod", pod="a")

    async def sample() -> ReplicaSample | None:
        return (await prometheus.samples([address("prod/a", replica)])).get("prod/a")

    before = await until(sample)
    server.kill()
    assert await sample() is None
    assert prometheus.problem is not None
    replica.running, replica.silent = 9, True  # so that nothing new is scraped after the restart
    await server.start()

    async def answers() -> bool:
        await sample()
        return prometheus.problem is None

    await until(answers)
    again = await sample()
    assert again is None or again.time <= before.time + 1.0, "the age tells that this is from before"
    replica.silent = False

    async def fresh() -> bool:
        seen = await sample()
        return seen is not None and seen.running == 9 and time.time() - seen.time < SAMPLE_SECONDS

    assert await until(fresh)


async def test_silent_engine_is_lost_at_once_while_others_stay(server, prometheus, engine):
    first, second = await engine(), await engine()
    server.show(first.address, second.address)
    pair = [address("chat-0", first), address("chat-1", second)]

    async def seen() -> list[str]:
        return sorted(await prometheus.samples(pair))

    async def both() -> bool:
        return await seen() == ["chat-0", "chat-1"]

    async def one() -> bool:
        return await seen() == ["chat-1"]

    assert await until(both)
    first.silent = True
    assert await until(one), "a failed scrape ends the series: it is not the last value for five minutes"
