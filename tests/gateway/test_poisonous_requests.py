"""A request that kills engine processes ends two of them, with real engines behind two gateways.

The engines are whole processes with the fake runner. A token in the prompt makes the engine process die.
"""

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import poisonable_engine
import pytest

from quire_common.contract.gateway import Endpoint

MODEL = Path(__file__).parents[2] / "examples" / "models" / "quire-demo"
STREAM_TOKENS = 400


class Engine:
    """A quire-engine on a loopback port, and its log."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.process, self.log = name, process, ""
        self.url = ""
        self._changed = asyncio.Event()
        self._ended = False

    async def follow(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()
            self._changed.set()
        self._ended = True
        self._changed.set()

    async def until(self, text: str) -> None:
        while text not in self.log:
            assert not self._ended, self.log
            self._changed.clear()
            await self._changed.wait()

    @property
    def deaths(self) -> int:
        return self.log.count("; starting it again")

    def endpoint(self) -> Endpoint:
        return Endpoint(id=self.name, url=self.url, ready=True, serving=True, terminating=False)


async def start(name: str) -> Engine:
    command = ["-m", "poisonable_engine", "--model", str(MODEL), "--served-model-name", "chat"]
    command += ["--host", "127.0.0.1", "--port", "0", "--threads", "1", "--engine-hang-timeout", "1s"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(poisonable_engine.__file__).parent), *sys.path]),
    }
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=PIPE, env=environment)
    return Engine(name, process)


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    started = [await start(f"chat-{number}") for number in range(3)]
    following = [asyncio.create_task(engine.follow()) for engine in started]
    try:
        for engine in started:
            await engine.until(" ready: chat")
            found = re.search(r"listening on (https?://\S+);", engine.log)
            assert found is not None, engine.log
            engine.url = found[1]
        yield started
    finally:
        for engine in started:
            engine.process.kill()
        await asyncio.gather(*following, *(engine.process.wait() for engine in started))


async def until_ready(gateway, engine: Engine) -> None:
    while True:
        async with gateway.client.get(f"{engine.url}/readyz") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.05)


async def stream(gateway, begun: asyncio.Event) -> tuple[str, int, str]:
    """Read a whole stream through the gateway: its replica, the tokens in its usage, its last event."""
    body = {"model": "chat", "prompt": "x", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    tokens, last = 0, ""
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                last = line[6:].decode().strip()
                begun.set()
                if last != "[DONE]":
                    tokens = (json.loads(last).get("usage") or {}).get("completion_tokens", 0)
        return response.headers["X-Quire-Replica"], tokens, last


async def whole(gateway, prompt: str) -> tuple[int, int]:
    """Get a whole answer through the gateway: its status and the tokens in its usage."""
    status, body = await gateway.complete(prompt=prompt, max_tokens=STREAM_TOKENS, ignore_eos=True)
    return status, (body.get("usage") or {}).get("completion_tokens", 0)


@pytest.mark.slow
async def test_poisonous_request_kills_at_most_two_engines(start_gateway, engines):
    """The streams of the replica that did not get the request run to their end; whole answers survive one death."""
    for kind, token in (
        ("crash", poisonable_engine.CRASH),
        ("hang", poisonable_engine.HANG),
        ("out of memory", poisonable_engine.OUT_OF_MEMORY),
    ):
        # New gateways suspect no replica, so each engine gets three of the streams.
        gateway, second = [await start_gateway(hold_timeout_seconds=60.0, hold_limit=100) for _ in range(2)]
        for each_gateway in (gateway, second):
            await each_gateway.push(chat=[engine.endpoint() for engine in engines])
        before = {engine.name: engine.deaths for engine in engines}
        begun = [asyncio.Event() for _ in range(9)]
        streams = [asyncio.create_task(stream(gateway, each)) for each in begun]
        for each in begun:
            await each.wait()
        answers = [asyncio.create_task(whole(each, f"x{n}")) for n, each in enumerate([gateway, second] * 6)]
        while sum(b.in_flight for each in (gateway, second) for b in each.gateway.fleet.backends()) < 9 + len(answers):
            await asyncio.sleep(0.01)

        status, body = await gateway.complete(prompt=[5, token, 6], max_tokens=4)

        assert (status, body["error"]["code"]) == (502, "replica_failed"), kind
        assert (await gateway.complete(prompt=[5, token, 6], max_tokens=4))[0] == 502, kind
        found = Counter(await asyncio.gather(*answers))
        # Those that were on both engines fail too.
        assert set(found) <= {(200, STREAM_TOKENS), (502, 0)} and found[200, STREAM_TOKENS] > 0, kind
        ends = await asyncio.gather(*streams)
        died = {engine.name for engine in engines if engine.deaths > before[engine.name]}
        # The retry may be on the engine that died, once it runs again.
        assert sum(engine.deaths for engine in engines) - sum(before.values()) == 2, kind
        undisturbed = [end for end in ends if end[0] not in died]
        assert undisturbed and all(last == "[DONE]" and tokens == STREAM_TOKENS for _, tokens, last in undisturbed), (
            kind
        )
        # A stream may have ended before the second engine died.
        cut = [end for end in ends if end[2] != "[DONE]"]
        assert cut and {end[0] for end in cut} <= died, kind
        assert all(json.loads(last)["error"]["code"] == "engine_stopped" for *_, last in cut), kind
        print(f"{kind}: {len(died)} engines died; {len(undisturbed)} streams went on, {len(cut)} were cut; {found}")
        await asyncio.gather(*(until_ready(gateway, engine) for engine in engines))
        # The replicas are suspect for a while; a request that no replica accepts is held until one does.
        assert (await gateway.complete(prompt="x", max_tokens=1))[0] == 200
