"""An engine runs one request at a time that another engine was lost with."""

import asyncio

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from quire_common.contract.engine import TRIAL_HEADER, TRIAL_RUNNING, TRIAL_TOGETHER
from quire_engine.server.http.one_trial import OneTrial

TRIAL = [(TRIAL_HEADER.lower().encode(), b"1")]
TOGETHER = [(TRIAL_HEADER.lower().encode(), TRIAL_TOGETHER.encode())]


class App:
    """An application whose answers wait."""

    def __init__(self) -> None:
        self.begin, self.end = asyncio.Event(), asyncio.Event()
        self.num_started = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_started += 1
        await self.begin.wait()

        async def events():
            yield b"data: 1\n\n"
            await self.end.wait()

        await StreamingResponse(events())(scope, receive, send)


async def post(app: OneTrial, headers: list[tuple[bytes, bytes]], started: asyncio.Event | None = None) -> int:
    status = 0

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        if started is not None:
            started.set()

    await app({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)
    return status


async def test_second_trial_is_refused_until_the_first_starts() -> None:
    app = App()
    trials = OneTrial(app)
    begun = asyncio.Event()
    first = asyncio.create_task(post(trials, TRIAL, begun))
    await asyncio.sleep(0)
    assert await post(trials, TRIAL) == 429
    other = asyncio.create_task(post(trials, []))
    app.begin.set()
    await begun.wait()

    second = asyncio.create_task(post(trials, TRIAL))
    app.end.set()

    assert await asyncio.gather(first, second, other) == [200, 200, 200]
    assert app.num_started == 3


@pytest.mark.parametrize(
    ("first", "second", "status"), [(TOGETHER, TOGETHER, 200), (TOGETHER, TRIAL, 429), (TRIAL, TOGETHER, 429)]
)
async def test_streams_run_concurrently_but_not_with_a_trial(
    first: list[tuple[bytes, bytes]], second: list[tuple[bytes, bytes]], status: int
) -> None:
    app = App()
    trials = OneTrial(app)
    running = asyncio.create_task(post(trials, first))
    await asyncio.sleep(0)
    other = asyncio.create_task(post(trials, second))
    await asyncio.sleep(0)
    app.begin.set()
    app.end.set()
    assert await asyncio.gather(running, other) == [200, status]


async def test_trial_ends_when_its_gateway_disconnects() -> None:
    app = App()
    trials = OneTrial(app)
    first = asyncio.create_task(post(trials, TRIAL))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    app.begin.set()
    app.end.set()
    assert await post(trials, TRIAL) == 200


def test_refused_trial_has_retry_after() -> None:
    inner: list[TestClient] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Another trial arrives while this one has no answer.
        refused = await asyncio.to_thread(inner[0].post, "/", headers={TRIAL_HEADER: "1"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == TRIAL_RUNNING
        await PlainTextResponse("ok")(scope, receive, send)

    trials = OneTrial(app)
    inner.append(TestClient(trials))
    assert TestClient(trials).post("/", headers={TRIAL_HEADER: "1"}).text == "ok"
