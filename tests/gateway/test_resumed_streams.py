"""A stream that its engine makes resumable goes on at another replica, as one stream for the client."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice

import aiohttp
import pytest
from aiohttp import web

from quire_common.contract.engine import (
    ENGINE_STOPPED,
    RESUMABLE_HEADER,
    RESUME_COMMENT,
    RESUME_FIELD,
    TOKENS_COMMENT,
    USAGE_COMMENT,
)
from quire_common.contract.gateway import CANARY, STABLE, CanaryRoute
from quire_gateway.bodies import Body, BodyMemory
from quire_gateway.event_stream import EventSplitter, OpenStream

FACTS = {"seed": 7, "created": 1, "prompt": "ab"}
ANSWER = list(range(10))


def event(token: int) -> bytes:
    return b'data: {"t":%d}\n\n' % token


WHOLE = b"".join(map(event, ANSWER)) + b"data: [DONE]\n\n"


def marked(token: int) -> bytes:
    return event(token) + TOKENS_COMMENT + b"[%d]\n\n" % token


class Engine:
    """The behaviour of an engine that streams ``ANSWER`` and ends in a chosen way after some tokens."""

    def __init__(self, end: str = "", after: int = 0, *, announces: bool = True) -> None:
        self.end, self.after, self.announces = end, after, announces
        self.at_end = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        assert request.headers[RESUMABLE_HEADER] == "1"
        body = await request.json()
        known = body.get(RESUME_FIELD, {}).get("token_ids", [])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.announces:
            response.headers[RESUMABLE_HEADER] = "yes"
        await response.prepare(request)
        if self.announces:
            await response.write(RESUME_COMMENT + json.dumps(FACTS).encode() + b"\n\n")
        for number, token in enumerate(ANSWER[len(known) :]):
            if self.end and number == self.after:
                return await self._end(request, response, token)
            await response.write(marked(token) if self.announces else event(token))
        await response.write(USAGE_COMMENT + b'{"prompt_tokens":1,"completion_tokens":10}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _end(self, request: web.Request, response: web.StreamResponse, token: int) -> web.StreamResponse:
        # The tokens of this event never arrive: it must be dropped.
        await response.write(event(token))
        self.at_end.set()
        if self.end == "waits":
            await self.go_on.wait()
            await response.write(TOKENS_COMMENT + b"[%d]\n\n" % token)
            await asyncio.Event().wait()
        if self.end == "kill later":
            await self.go_on.wait()
        elif self.end != "kill":
            await response.write(b'event: error\ndata: {"error":{"message":"x","code":"%b"}}\n\n' % self.end.encode())
        await asyncio.sleep(0.01)
        assert request.transport is not None
        request.transport.abort()
        return response


class Together(Engine):
    """An engine that sends tokens only when so many streams run at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.running, self.all_run = number, 0, asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        if self.running == self.number:
            self.all_run.set()
        await self.all_run.wait()
        return await super().__call__(request)


async def stream(gateway) -> bytes:
    body = {"model": "chat", "prompt": "x", "stream": True}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=body) as response:
        assert response.status == 200
        data = b""
        try:
            while chunk := await response.content.readany():
                data += chunk
        except Exception:
            assert data
        return data


@pytest.mark.parametrize("end", ["kill", ENGINE_STOPPED, "shutting_down"])
@pytest.mark.parametrize("after", [0, 1, 5])
async def test_stream_resumes_at_another_replica(gateway, replicas, end, after):
    one, two = await replicas("one"), await replicas("two")
    one.behaviour, two.behaviour = Engine(end, after), Engine()
    two.load |= {"running": 50}
    await gateway.push_and_scrape(chat=[one.endpoint(), two.endpoint()])

    data = await stream(gateway)

    # The usage comment is for gateways with limits; without limits it is relayed, as any comment is.
    assert data.replace(USAGE_COMMENT + b'{"prompt_tokens":1,"completion_tokens":10}\n\n', b"") == WHOLE
    assert two.bodies[0][RESUME_FIELD] == {**FACTS, "token_ids": ANSWER[:after]}
    assert await gateway.metric("quire_gateway_resumed_streams_total") == 1
    assert await gateway.metric("quire_gateway_broken_streams_total") == 0
    assert gateway.gateway.body_memory.used_bytes == 0


async def test_stream_that_kills_two_engines_ends_with_an_error(gateway, replicas):
    fleet = [await replicas(name) for name in "abcd"]
    for replica in fleet:
        replica.behaviour = Engine(ENGINE_STOPPED, 2)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    data = await stream(gateway)

    assert data.startswith(b"".join(map(event, ANSWER[:4]))) and b"replica_failed" in data and b"[DONE]" not in data
    assert data.count(b"event: error") == 1
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/completions", json={"model": "chat", "prompt": "x", "stream": True}) as again,
    ):
        assert again.status == 502
    assert sum(len(replica.bodies) for replica in fleet) == 2


async def test_streams_of_a_dead_replica_resume_together(gateway, replicas):
    """All of them run at the other replica before the first one ends."""
    one, two = await replicas("one"), await replicas("two")
    dying = one.behaviour = Engine("kill later", 2)
    two.behaviour = Together(8)
    two.load |= {"running": 50}
    two.told["quire_max_running_requests"] = 100
    await gateway.push_and_scrape(chat=[one.endpoint(), two.endpoint()])
    reading = [asyncio.create_task(stream(gateway)) for _ in range(8)]
    while len(one.bodies) < 8:
        await asyncio.sleep(0.01)
    dying.go_on.set()

    texts = await asyncio.gather(*reading)

    assert [text.count(b"data: {") for text in texts] == [len(ANSWER)] * 8
    assert await gateway.metric("quire_gateway_resumed_streams_total") == 8


async def test_stream_resumes_on_its_own_track(gateway, replicas):
    """The canary's stream goes to its other replica, although the stable one is idle."""
    fleet = {name: await replicas(name) for name in ("stable", "canary-a", "canary-b")}
    for replica in fleet.values():
        replica.behaviour = Engine()
    fleet["canary-a"].behaviour = Engine(ENGINE_STOPPED, 2)
    fleet["canary-b"].load |= {"running": 9}
    gateway.discovery.canary = CanaryRoute(revision="r2", weight_percent=90)
    await gateway.push_and_scrape(
        chat=[
            fleet["stable"].endpoint(track=STABLE),
            fleet["canary-a"].endpoint(track=CANARY),
            fleet["canary-b"].endpoint(track=CANARY),
        ]
    )

    data = await stream(gateway)

    assert [len(replica.bodies) for replica in fleet.values()] == [0, 1, 1] and b"[DONE]" in data


@pytest.mark.parametrize(("end", "errors"), [(ENGINE_STOPPED, 1), ("shutting_down", 0), ("waits", 0)])
async def test_planned_move_is_no_error_of_its_track(gateway, replicas, end, errors):
    """A canary replica that a node drain or a scale-down ends has not failed."""
    one, two = await replicas("canary-a"), await replicas("canary-b")
    leaving = one.behaviour = Engine(end, 2)
    two.behaviour = Engine()
    gateway.discovery.canary = CanaryRoute(revision="r2", weight_percent=90)
    await gateway.push(chat=[one.endpoint(track=CANARY)])
    reading = asyncio.create_task(stream(gateway))
    await leaving.at_end.wait()
    await gateway.push(chat=[one.endpoint(terminating=end == "waits", track=CANARY), two.endpoint(track=CANARY)])
    leaving.go_on.set()

    assert b"[DONE]" in await reading

    canary = (await gateway.page("/tracks"))["models"]["chat"]["tracks"][CANARY]
    assert (canary["requests"], canary["errors"]) == (1 + errors, errors)


@pytest.mark.parametrize(
    ("engine", "error"),
    [(Engine("kill", 3, announces=False), b"replica_failed"), (Engine("internal", 3), b'"internal"')],
    ids=["not announced", "another error"],
)
async def test_non_resumable_streams_end_with_their_error(gateway, replicas, engine, error):
    one, two = await replicas("one"), await replicas("two")
    one.behaviour = two.behaviour = engine
    await gateway.push(chat=[one.endpoint(), two.endpoint()])

    data = await stream(gateway)

    assert error in data and data.count(b"event: error") == 1
    assert len(one.bodies) + len(two.bodies) == 1


async def test_stream_leaves_a_replica_that_terminates(gateway, replicas):
    one, two = await replicas("one"), await replicas("two")
    leaving = one.behaviour = Engine("waits", 4)
    two.behaviour = Engine()
    await gateway.push(chat=[one.endpoint()])
    reading = asyncio.create_task(stream(gateway))
    await leaving.at_end.wait()
    await gateway.push(chat=[one.endpoint(terminating=True), two.endpoint()])

    leaving.go_on.set()

    assert (await reading).startswith(b"".join(map(event, ANSWER)))
    # The gateway may notice it before the last token arrives.
    assert two.bodies[0][RESUME_FIELD]["token_ids"] in (ANSWER[:4], ANSWER[:5])
    await one.left.wait()


async def test_stream_stays_where_no_other_replica_is_ready(gateway, replicas):
    one = await replicas("one")
    staying = one.behaviour = Engine("waits", 4)
    await gateway.push(chat=[one.endpoint()])
    reading = asyncio.create_task(stream(gateway))
    await staying.at_end.wait()
    await gateway.push(chat=[one.endpoint(terminating=True)])
    staying.go_on.set()
    await asyncio.sleep(0.05)  # long enough to see no effect

    assert not one.left.is_set() and not reading.done()
    reading.cancel()
    await asyncio.wait({reading})


class Unsuited(Engine):
    """An engine with another tokenizer than the one that began a stream."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if RESUME_FIELD in await request.json():
            return web.json_response({"error": {"message": "no", "code": "not_resumable"}}, status=400)
        return await super().__call__(request)


@pytest.mark.parametrize("end", ["waits", "shutting_down", "kill later", ENGINE_STOPPED])
async def test_stream_passes_replicas_that_cannot_continue_it(gateway, replicas, end):
    """In a rolling update to another tokenizer, an old replica continues the stream, however busy it is."""
    leaving, old = await replicas("leaving"), await replicas("old")
    new = [await replicas(f"new-{number}") for number in range(4)]
    engine = leaving.behaviour = Engine(end, 4)
    old.behaviour = Engine()
    old.load |= {"running": 50}
    for replica in new:
        replica.behaviour = Unsuited()
        replica.load |= {"running": 25}
    staying = [replica.endpoint() for replica in (*new, old)]
    await gateway.push_and_scrape(chat=[*staying, leaving.endpoint()])
    reading = asyncio.create_task(stream(gateway))
    await engine.at_end.wait()
    if end == "waits":
        await gateway.push(chat=[*staying, leaving.endpoint(terminating=True)])
    engine.go_on.set()

    data = await reading

    assert data.startswith(b"".join(map(event, ANSWER))) and data.endswith(b"data: [DONE]\n\n")
    assert all(len(replica.bodies) <= 1 for replica in new)
    assert await gateway.metric("quire_gateway_broken_streams_total") == 0


@pytest.mark.parametrize("end", ["shutting_down", ENGINE_STOPPED])
async def test_stream_that_no_replica_can_continue_ends_with_an_error(gateway, replicas, end):
    fleet = [await replicas(name) for name in ("one", "two")]
    for replica in fleet:
        replica.behaviour = Unsuited(end, 2)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    data = await stream(gateway)

    assert data.count(b"event: error") == 1 and b'"replica_failed"' in data and b"answered 400" in data
    assert sum(len(replica.bodies) for replica in fleet) == 3


@pytest.mark.parametrize(
    "cut",
    [lambda data, at: [data[:at], data[at:]], lambda data, at: [data[i : i + at] for i in range(0, len(data), at)]],
)
def test_events_are_relayed_with_their_tokens(cut: Callable[[bytes, int], list[bytes]]) -> None:
    data = RESUME_COMMENT + b"{}\n\n: keep-alive\n\n" + marked(1) + b": keep-alive\n\n" + event(2) + event(3)
    data += TOKENS_COMMENT + b"[2,3]\n\n" + b"data: [DONE]\n\n"
    parts = [part + b"\n\n" for part in data.split(b"\n\n")[:-1]]
    for at in range(1, len(parts)):
        kept, out = OpenStream(Body(BodyMemory(2**22), "")), b""
        kept.start(is_announced=True)
        for piece in cut(parts, at):
            out += kept.feed(b"".join(piece))
        assert out + kept.flush() == b": keep-alive\n\n" + event(1) + b": keep-alive\n\n" + event(2) + event(3) + (
            b"data: [DONE]\n\n"
        )
        assert json.loads(kept.body(b' {"a":1}')) == {RESUME_FIELD: {"token_ids": [1, 2, 3]}, "a": 1}


@pytest.mark.parametrize(
    ("held", "is_complete"),
    [
        (b"data: [DONE]\n\n", True),
        (event(1) + b"data: [DONE]\n\n", True),
        (b'data: {"text":"write data: [DONE]\\n"}\n\n', False),
        (event(1), False),
    ],
)
def test_text_about_the_last_event_does_not_end_a_stream(held: bytes, is_complete: bool) -> None:
    kept = OpenStream(Body(BodyMemory(2**22), ""))
    kept.start(is_announced=True)
    kept.feed(RESUME_COMMENT + b"{}\n\n" + held)
    assert kept.is_complete is is_complete


def endless(kind: str) -> Iterator[bytes]:
    """Yield the chunks of an engine that announces a resumable stream and then sends nothing but this."""
    yield RESUME_COMMENT + b"{}\n\n" + marked(1)
    while True:
        yield {
            "events": b"data: " + b"x" * 60_000 + b"\n\n",
            "facts": RESUME_COMMENT + b'{"a":"' + b"x" * 60_000 + b'"}\n\n',
            "tokens": event(1) + TOKENS_COMMENT + b"[" + b"0," * 30_000 + b"0]\n\n",
            "no tokens": TOKENS_COMMENT + b'"many"\n\n',
            "large tokens": TOKENS_COMMENT + b"[1e400, 99999999999999999999]\n\n",
            "deep facts": RESUME_COMMENT + b'{"a":' + b"[" * 60_000 + b"\n\n",
            "empty events": b"\n\n" * 30_000,
            "unfinished": b"x" * 60_000,
            "other line ends": b"data: x\r\n\r\n" * 4_000,
        }[kind]


@pytest.mark.parametrize(
    "kind",
    ["events", "facts", "tokens", "no tokens", "large tokens", "deep facts", "empty events", "unfinished"]
    + ["other line ends"],
)
@pytest.mark.parametrize("limit", [2**18, 2**24])
def test_stream_beyond_its_memory_goes_on_but_cannot_move(kind: str, limit: int) -> None:
    memory = BodyMemory(limit)
    body = Body(memory, "")
    kept, sent, relayed = OpenStream(body), b"", b""
    kept.start(is_announced=True)
    splitter = EventSplitter()
    for chunk in islice(endless(kind), 80):
        sent += chunk
        relayed += kept.feed(splitter.feed(chunk))
        assert memory.used_bytes <= 2**20
    assert not kept.is_resumable and memory.used_bytes == 0
    relayed += kept.feed(splitter.flush()) + kept.flush()
    comments = re.compile(rb"^: quire-(?:resume|tokens) .*\n\n", re.MULTILINE)
    assert relayed == comments.sub(b"", sent)
    body.release()
    assert memory.used_bytes == 0


def test_long_array_of_tokens_is_kept() -> None:
    kept = OpenStream(Body(BodyMemory(2**22), ""))
    kept.start(is_announced=True)
    kept.feed(RESUME_COMMENT + b'{"seed":-9223372036854775808}\n\n')
    kept.feed(event(1) + TOKENS_COMMENT + json.dumps(list(range(100_000))).encode() + b"\n\n")
    body = json.loads(kept.body(b'{"a":1}'))
    assert body[RESUME_FIELD]["seed"] == -(2**63) and len(body[RESUME_FIELD]["token_ids"]) == 100_000
