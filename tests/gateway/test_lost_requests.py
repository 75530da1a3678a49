"""Requests that were lost with a replica are tried once more, one at a time per replica."""

import asyncio

import pytest
from aiohttp import web

from quire_common.contract.engine import ENGINE_STOPPED, TRIAL_HEADER, TRIAL_RUNNING

POISON = "poison"


def refusal(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": "no", "code": code}}, status=status)


class Engine:
    """The behaviour of an engine that answers on demand, and that a prompt kills."""

    def __init__(self) -> None:
        self.running: set[asyncio.Future[web.Response]] = set()
        self.changed = asyncio.Event()
        self.deaths = 0
        self.most_lost_at_once = 0
        self._num_lost = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer: asyncio.Future[web.Response] = asyncio.get_running_loop().create_future()
        self.running.add(answer)
        self._num_lost += TRIAL_HEADER in request.headers
        self.most_lost_at_once = max(self.most_lost_at_once, self._num_lost)
        self.changed.set()
        if TRIAL_HEADER in request.headers:
            asyncio.get_running_loop().call_later(0.01, self.kill if body["prompt"] == POISON else self.finish)
        try:
            return await answer
        finally:
            self.running.discard(answer)
            self._num_lost -= TRIAL_HEADER in request.headers

    def kill(self) -> None:
        self.deaths += 1
        self._answer_all(lambda: refusal(503, ENGINE_STOPPED))

    def finish(self) -> None:
        self._answer_all(lambda: web.json_response({"object": "text_completion"}))

    def _answer_all(self, make) -> None:
        for answer in self.running:
            if not answer.done():
                answer.set_result(make())

    async def until_running(self, count: int) -> None:
        while len(self.running) != count:
            self.changed.clear()
            await self.changed.wait()


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
async def test_requests_lost_with_a_poisonous_one_succeed(start_gateway, replicas, num_replicas):
    gateway = await start_gateway(hold_limit=0, hold_timeout_seconds=60.0)
    fleet = [await replicas(f"chat-{number}") for number in range(num_replicas)]
    engines = [Engine() for _ in fleet]
    for replica, engine in zip(fleet, engines, strict=True):
        replica.behaviour = engine
    await gateway.push(chat=[fleet[0].endpoint()])
    poisonous = asyncio.create_task(gateway.complete(prompt=POISON))
    harmless = [asyncio.create_task(gateway.complete(prompt="x")) for _ in range(12)]
    await engines[0].until_running(13)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    engines[0].kill()

    status, body = await poisonous
    assert (status, body["error"]["code"]) == (502, "replica_failed")
    assert [status for status, _ in await asyncio.gather(*harmless)] == [200] * 12
    assert sum(engine.deaths for engine in engines) == 2
    assert max(engine.most_lost_at_once for engine in engines) == 1
    assert gateway.gateway.metrics.held["chat"] == 0


async def test_trial_refused_for_another_gateway_is_repeated(gateway, replicas):
    chat = await replicas("chat-0")
    answers = [refusal(503, ENGINE_STOPPED), refusal(429, TRIAL_RUNNING), refusal(429, "queue_full")]

    async def behave(request: web.Request) -> web.StreamResponse:
        return answers.pop(0) if answers else await chat.say_name(request)

    chat.behaviour = behave
    await gateway.push(chat=[chat.endpoint()])

    assert (await gateway.complete())[0] == 200
    assert [TRIAL_HEADER in headers for headers in chat.headers] == [False, True, True, True]
    assert await gateway.metric("quire_gateway_retries_total", reason="trial_running") == 1


async def test_stream_ends_its_trial_with_its_first_byte(gateway, replicas):
    chat = await replicas("chat-0")
    ends, lost = asyncio.Event(), asyncio.Event()
    num_lost = 0

    async def behave(request: web.Request) -> web.StreamResponse:
        nonlocal num_lost
        if TRIAL_HEADER not in request.headers:
            num_lost += 1
            if num_lost == 2:
                lost.set()
            await lost.wait()
            return refusal(503, ENGINE_STOPPED)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await ends.wait()
        return response

    chat.behaviour = behave
    await gateway.push(chat=[chat.endpoint()])

    async def stream() -> None:
        async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
            await response.content.readline()
            await response.release()

    # Both begin although neither ends.
    await asyncio.gather(stream(), stream())
    ends.set()


async def test_lost_request_that_no_replica_can_try_is_502(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.3)
    chat = await replicas("chat-0")

    async def behave(request: web.Request) -> web.StreamResponse:
        await gateway.push(chat=[chat.endpoint(ready=False)])
        return refusal(503, ENGINE_STOPPED)

    chat.behaviour = behave
    await gateway.push(chat=[chat.endpoint()])

    status, body = await gateway.complete()

    assert (status, body["error"]["code"]) == (502, "replica_failed")
    assert "within 0.3 s" in body["error"]["message"]
    assert len(chat.bodies) == 1


async def test_lost_request_of_a_removed_model_is_404(gateway, replicas):
    chat = await replicas("chat-0")

    async def behave(request: web.Request) -> web.StreamResponse:
        await gateway.push(chat=[chat.endpoint(ready=False)])
        return refusal(503, ENGINE_STOPPED)

    chat.behaviour = behave
    await gateway.push(chat=[chat.endpoint()])
    call = asyncio.create_task(gateway.complete())
    await gateway.until_held(1)
    await gateway.push()

    assert (await call)[0] == 404


async def test_clients_cannot_request_a_trial(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])
    headers = {TRIAL_HEADER: "1"}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}, headers=headers) as answer:
        assert answer.status == 200
    assert TRIAL_HEADER not in chat.headers[0]


async def test_other_requests_avoid_the_replica_of_a_trial(gateway, replicas):
    one, two = await replicas("one"), await replicas("two")
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def behave(request: web.Request) -> web.StreamResponse:
        if TRIAL_HEADER not in request.headers:
            return refusal(503, ENGINE_STOPPED)
        waiting.set()
        await go_on.wait()
        return web.json_response({"object": "text_completion"})

    one.behaviour = behave
    await gateway.push(chat=[one.endpoint()])
    lost = asyncio.create_task(gateway.complete())
    await waiting.wait()
    await gateway.push(chat=[one.endpoint(), two.endpoint()])

    answers = [await gateway.complete() for _ in range(6)]
    go_on.set()

    assert {body["served_by"] for _, body in answers} == {"two"}
    assert (await lost)[0] == 200
