"""A gate that compares answers repeats sampled requests on both tracks, after their clients have the answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from quire_common.contract.gateway import CANARY, STABLE, CanaryRoute

GREEDY = {"prompt": "x", "temperature": 0}


def says(*texts: str, status: int = 200) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the behaviour of a replica that always answers these tokens."""

    async def answer(request: web.Request) -> web.StreamResponse:
        likely = [{text: -0.01} for text in texts]
        logprobs = {"tokens": texts, "token_logprobs": [-0.01] * len(texts), "top_logprobs": likely}
        return web.json_response({"choices": [{"text": "".join(texts), "logprobs": logprobs}]}, status=status)

    return answer


@pytest.fixture
async def start(gateway: Any, replicas: Any) -> Any:
    """Return a function that publishes a stable replica and a canary, and returns both."""

    async def publish(*, compared: float = 100.0, weight: int = 50) -> Any:
        stable, canary = await replicas("s"), await replicas("c")
        stable.behaviour = canary.behaviour = says("a", "b")
        route = CanaryRoute(revision="r2", weight_percent=weight, compared_percent=compared)
        gateway.discovery.canary = route
        await gateway.push(chat=[stable.endpoint(track=STABLE), canary.endpoint(track=CANARY)])
        return stable, canary

    return publish


async def answers(gateway: Any) -> Any:
    """Return the figures after all comparisons have ended."""
    while running := list(gateway.gateway.proxy.comparisons._running.values()):
        await asyncio.wait(running)
    return (await gateway.page("/tracks"))["models"]["chat"]["answers"]


NONE = {"compared": 0, "different": 0, "nearTies": 0, "failed": 0}


async def ask(gateway: Any, **fields: object) -> Any:
    status, _ = await gateway.complete(**{**GREEDY, **fields})
    return status


@pytest.mark.parametrize(
    ("canary", "counted", "result"),
    [
        (says("a", "b"), {"compared": 1}, "same"),
        (says("a", "c"), {"compared": 1, "different": 1}, "different"),
        (says(status=400), {"compared": 1, "different": 1}, "different"),
        (says(status=500), {"failed": 1}, "failed"),
    ],
)
async def test_sampled_request_is_compared(
    gateway: Any, start: Any, canary: Any, counted: dict[str, int], result: str
) -> None:
    one, other = await start(weight=1)
    other.behaviour = canary
    assert await ask(gateway, stream=False, user="kept") == 200
    assert await answers(gateway) == NONE | counted
    assert await gateway.metric("quire_gateway_compared_answers_total", result=result) == 1
    assert other.bodies == [{"model": "chat", **GREEDY, "user": "kept", "max_tokens": 64, "logprobs": 5}]
    # The client's own request, and the repeated one.
    assert [len(one.bodies), "logprobs" in one.bodies[0], "logprobs" in one.bodies[1]] == [2, False, True]
    # The repeated requests are no requests of the tracks.
    assert await gateway.metric("quire_gateway_track_requests_total") == 1


async def test_only_the_sample_is_repeated(gateway: Any, start: Any) -> None:
    await start(compared=25.0)
    for _ in range(20):
        await ask(gateway)
        await answers(gateway)
    assert (await answers(gateway))["compared"] == 5


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ({"compared": 0.0}, {}),
        ({"weight": 0}, {}),
        ({}, {"temperature": 1}),
        ({}, {"prompt": "x" * 300_000}),
    ],
    ids=["no gate", "no weight", "not greedy", "long"],
)
async def test_other_requests_are_not_repeated(gateway: Any, start: Any, route: Any, fields: Any) -> None:
    one, other = await start(**route)
    assert await ask(gateway, **fields) == 200
    assert await answers(gateway) == NONE
    assert len(one.bodies) + len(other.bodies) == 1


async def test_refused_request_is_not_repeated(gateway: Any, start: Any) -> None:
    one, other = await start()
    one.behaviour = other.behaviour = says(status=400)
    assert await ask(gateway) == 400
    assert await answers(gateway) == NONE
    assert len(one.bodies) + len(other.bodies) == 1


async def test_comparison_skips_a_full_replica(gateway: Any, start: Any) -> None:
    one, other = await start(weight=1)
    other.load |= {"running": 50}
    other.scraped.clear()
    while any(
        not b.load or (b.endpoint.track == CANARY and b.load.requests < 50) for b in gateway.gateway.fleet.backends()
    ):
        await asyncio.sleep(0.01)
    assert await ask(gateway) == 200
    assert await answers(gateway) == NONE
    assert (len(one.bodies), len(other.bodies)) == (1, 0)


async def test_one_comparison_runs_at_a_time(gateway: Any, start: Any) -> None:
    one, other = await start(weight=1)
    go_on, slow = asyncio.Event(), says("a", "b")

    async def wait(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await slow(request)

    other.behaviour = wait
    assert [await ask(gateway) for _ in range(3)] == [200] * 3
    go_on.set()
    assert (await answers(gateway))["compared"] == 1
    assert len(other.bodies) == 1 and len(one.bodies) == 4


async def test_shutdown_ends_a_comparison(gateway: Any, start: Any) -> None:
    one, other = await start(weight=1)

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    other.behaviour = hang
    assert await ask(gateway) == 200
    await other.arrived.wait()
    await gateway.gateway.stop()
    await asyncio.wait_for(other.left.wait(), 60)
