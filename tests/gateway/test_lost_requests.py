"""Requests that were lost with a replica are retried once; a body that met two deaths is refused for a while."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from quire_common.contract.engine import ENGINE_STOPPED

POISON = "poison"


def refusal(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": "no", "code": code}}, status=status)


class Engine:
    """The behaviour of an engine that answers and dies on demand."""

    def __init__(self) -> None:
        self.running: dict[asyncio.Future[web.Response], str] = {}
        """The prompts of the requests that wait for an answer."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        answer: asyncio.Future[web.Response] = asyncio.get_running_loop().create_future()
        self.running[answer] = (await request.json())["prompt"]
        try:
            return await answer
        finally:
            del self.running[answer]

    def kill(self) -> list[str]:
        """End all requests, and return their prompts."""
        return self._answer_all(lambda: refusal(503, ENGINE_STOPPED))

    def finish(self) -> None:
        self._answer_all(lambda: web.json_response({"object": "text_completion"}))

    def _answer_all(self, make) -> list[str]:
        prompts = list(self.running.values())
        for answer in self.running:
            if not answer.done():
                answer.set_result(make())
        return prompts


async def ask(gateway, prompt: str = "x", *, stream: bool = True) -> tuple[int, bytes, str | None]:
    """Send a request over a connection of its own, because the end of a broken answer closes it."""
    body = {"model": "chat", "prompt": prompt, "stream": stream}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.read(), response.headers.get("x-should-retry")


async def until_running(count: int, *engines: Engine) -> None:
    while sum(len(engine.running) for engine in engines) != count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
async def test_requests_fail_only_if_they_were_lost_twice(start_gateway, replicas, num_replicas):
    gateway = await start_gateway(hold_limit=0, hold_timeout_seconds=60.0)
    fleet = [await replicas(f"chat-{number}") for number in range(num_replicas)]
    engines = [Engine() for _ in fleet]
    for replica, engine in zip(fleet, engines, strict=True):
        replica.behaviour = engine
    await gateway.push(chat=[fleet[0].endpoint()])
    prompts = [POISON, *map(str, range(12))]
    calls = {prompt: asyncio.create_task(gateway.complete(prompt=prompt)) for prompt in prompts}
    await until_running(13, engines[0])
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    engines[0].kill()
    await until_running(0, engines[0])
    await until_running(13, *engines)
    (second,) = (engine for engine in engines if POISON in engine.running.values())
    lost_twice = second.kill()
    for engine in engines:
        engine.finish()

    answers = {prompt: await call for prompt, call in calls.items()}
    assert {prompt for prompt, (status, _) in answers.items() if status != 200} == set(lost_twice)
    assert {answers[prompt][1]["error"]["code"] for prompt in lost_twice} == {"replica_failed"}
    assert sum(len(replica.bodies) for replica in fleet) == 26
    assert not any(gateway.gateway.metrics.held.values())


def abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


DEATHS = {
    "before the answer": None,
    "connection": b'data: {"t":1}\n\n',
    "error event": b'data: {"t":1}\n\nevent: error\ndata: {"error":{"message":"x","code":"engine_stopped"}}\n\n',
    "error event of a response": b'event: error\ndata: {"type":"error","code":"engine_stopped"}\n\n',
}
"""The part of a stream that arrives before its engine dies."""


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("start", DEATHS.values(), ids=DEATHS.keys())
async def test_client_that_repeats_a_poisonous_request_ends_two_engines(
    gateway, replicas, start: bytes | None, closes: bool
):
    fleet = [await replicas(name) for name in "abcdef"]
    deaths = []

    async def behave(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["prompt"] != POISON:
            return web.json_response({"object": "text_completion"})
        deaths.append(body)
        if start is None:
            return refusal(503, ENGINE_STOPPED)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(start)
        if closes or b"error" not in start:
            await asyncio.sleep(0.01)
            abort(request)
        return response

    for replica in fleet:
        replica.behaviour = behave
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    answers = [await ask(gateway, POISON, stream=start is not None) for _ in range(6)]

    assert len(deaths) == 2
    assert [(status, should_retry) for status, _, should_retry in answers[2:]] == [(502, "false")] * 4
    assert (await gateway.complete(prompt="x"))[0] == 200


async def test_complete_answer_between_two_deaths_prevents_a_quarantine(gateway, chat):
    ends = ["dies", "ends", "dies", "ends"]

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await asyncio.sleep(0.01)
        if ends.pop(0) == "dies":
            abort(request)
        return response

    chat.behaviour = behave

    for _ in range(4):
        assert (await ask(gateway))[0] == 200
    assert not ends


@pytest.mark.parametrize("code", [b"internal_error", b"shutting_down"])
async def test_stream_that_ends_with_another_error_met_no_death(gateway, chat, code):
    chat.break_after(b'event: error\ndata: {"error":{"code":"%b"}}\n\n' % code)

    for _ in range(4):
        assert code in (await ask(gateway))[1]
    assert len(chat.bodies) == 4


@pytest.mark.parametrize(("num_refusals", "status"), [(2, 200), (99, 429)])
async def test_lost_request_waits_for_a_full_replica(start_gateway, replicas, num_refusals, status):
    gateway = await start_gateway(hold_timeout_seconds=0.7)
    one, two = await replicas("one"), await replicas("two")

    async def die(request: web.Request) -> web.StreamResponse:
        await gateway.push(chat=[two.endpoint()])
        return refusal(503, ENGINE_STOPPED)

    async def behave(request: web.Request) -> web.StreamResponse:
        return refusal(429, "queue_full") if len(two.bodies) <= num_refusals else await two.say_name(request)

    one.behaviour, two.behaviour = die, behave
    await gateway.push(chat=[one.endpoint()])

    assert (await gateway.complete())[0] == status
    assert len(two.bodies) <= 4


async def test_lost_request_that_no_replica_can_retry_is_503(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.3)
    chat = await replicas("chat-0")

    async def behave(request: web.Request) -> web.StreamResponse:
        await gateway.push(chat=[chat.endpoint(ready=False)])
        return refusal(503, ENGINE_STOPPED)

    chat.behaviour = behave
    await gateway.push(chat=[chat.endpoint()])

    status, body = await gateway.complete()

    assert (status, body["error"]["code"]) == (503, "no_replica_ready")
    assert "within 0.3 s" in body["error"]["message"]
    assert len(chat.bodies) == 1


@pytest.mark.parametrize(("num_terminating", "status"), [(1, 200), (2, 200), (3, 502)])
async def test_planned_end_of_a_replica_counts_as_no_death_once(gateway, replicas, num_terminating, status):
    fleet = [await replicas(f"chat-{number}") for number in range(4)]

    async def behave(request: web.Request) -> web.StreamResponse:
        gone = sum(len(replica.bodies) for replica in fleet)
        if gone > num_terminating:
            return web.json_response({"object": "text_completion"})
        await gateway.push(
            chat=[replica.endpoint(terminating=bool(replica.bodies)) for replica in fleet[: num_terminating + 1]]
        )
        return refusal(503, ENGINE_STOPPED)

    for replica in fleet:
        replica.behaviour = behave
    await gateway.push(chat=[replica.endpoint() for replica in fleet[: num_terminating + 1]])

    assert (await gateway.complete())[0] == status


async def test_engines_of_older_releases_get_no_trial_header(gateway, chat):
    headers = {"X-Quire-Trial": "1"}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}, headers=headers) as answer:
        assert answer.status == 200
    assert "X-Quire-Trial" not in chat.headers[0]
