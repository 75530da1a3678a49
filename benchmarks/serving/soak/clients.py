"""Clients of two tenants that send every kind of request, leave in the middle of answers, and poison engines.

A client sends its next request when the last one is answered. What it sends depends only on its number.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle

import aiohttp

from benchmarks.serving.soak.poisonable import POISONS, REPEATS
from benchmarks.serving.soak.servers import KEYS, MODEL, Fleet

_WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("while", "small", "ships", "sail", "home"),
)
_CANCEL_SHARE = 0.15
_LONG_SHARE = 0.2
_PAUSE_SECONDS = 0.2
"""The pause after an error, so that clients do not flood a server that refuses them."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A stream that ended with an error."""

    replica: str
    seconds: float
    code: str


@dataclass(frozen=True, kw_only=True)
class PoisonAnswer:
    """The answer to a poisonous request."""

    kind: str
    status: int | None
    code: str | None


@dataclass
class Tally:
    """The results of all requests."""

    complete: Counter[str] = field(default_factory=Counter)
    """Complete answers by kind of request."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Complete answers by tenant."""
    errors: Counter[str] = field(default_factory=Counter)
    """Answers to harmless requests with an error status, by status and code."""
    broken: Counter[str] = field(default_factory=Counter)
    """Harmless requests without a complete answer or an error, by the reason."""
    num_cancelled: int = 0
    cuts: list[Cut] = field(default_factory=list)
    poisons: list[PoisonAnswer] = field(default_factory=list)


@dataclass
class Clients:
    """All clients of a soak. ``stop`` ends each after its request."""

    session: aiohttp.ClientSession
    fleet: Fleet
    began: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    tally: Tally = field(default_factory=Tally)

    async def run(self, number: int) -> None:
        """Send harmless requests one after the other."""
        chance = random.Random(number)
        tenant = sorted(KEYS)[number % len(KEYS)]
        while not self.stop.is_set():
            kind, path, body = _request(chance)
            sending = asyncio.create_task(self._send(tenant, kind, path, body))
            leaves_after = chance.uniform(0.02, 2.0) if chance.random() < _CANCEL_SHARE else None
            await asyncio.wait({sending}, timeout=leaves_after)
            if sending.done():
                sending.result()
                continue
            sending.cancel()
            await asyncio.wait({sending})
            self.tally.num_cancelled += 1

    async def poison(self, interval: float) -> None:
        """Send a poisonous request in each interval, as soon as every replica is ready, until cancelled."""
        loop = asyncio.get_running_loop()
        for place, kind in enumerate(cycle(POISONS)):
            await asyncio.sleep(max(0.0, self.began + (place + 0.5) * interval - loop.time()))
            while not await self.fleet.all_ready(self.session):
                await asyncio.sleep(0.2)
            if self.stop.is_set():
                return
            # The gateway refuses a body that it knows.
            body = {"model": MODEL, "prompt": [POISONS[kind]] * REPEATS, "max_tokens": 4, "seed": place}
            # A poisonous request is finished even if the soak ends meanwhile.
            await asyncio.shield(self._poison(kind, body))

    async def _poison(self, kind: str, body: dict[str, object]) -> None:
        status, code = None, None
        try:
            async with self.session.post(
                f"{self.fleet.gateway.url}/v1/completions", json=body, headers=_headers("tenant-b")
            ) as response:
                status, code = response.status, _code(await response.read())
        except aiohttp.ClientError as error:
            code = type(error).__name__
        self.tally.poisons.append(PoisonAnswer(kind=kind, status=status, code=code))

    async def _send(self, tenant: str, kind: str, path: str, body: dict[str, object]) -> None:
        url = f"{self.fleet.gateway.url}{path}"
        try:
            async with self.session.post(url, json=body, headers=_headers(tenant)) as response:
                if response.status != 200:
                    self.tally.errors[f"{response.status} {_code(await response.read())}"] += 1
                    await asyncio.sleep(_PAUSE_SECONDS)
                    return
                is_complete = await (self._read_stream(response) if body.get("stream") else _read_whole(response))
        except aiohttp.ClientError as error:
            self.tally.broken[type(error).__name__] += 1
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        if is_complete:
            self.tally.complete[kind] += 1
            self.tally.tenants[tenant] += 1

    async def _read_stream(self, response: aiohttp.ClientResponse) -> bool:
        """Read a stream, and return whether it was complete."""
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return True
            if line.startswith(b'data: {"error"'):
                seconds = asyncio.get_running_loop().time() - self.began
                replica, code = response.headers.get("X-Quire-Replica", ""), _code(line[6:])
                self.tally.cuts.append(Cut(replica=replica, seconds=seconds, code=str(code)))
                return False
        self.tally.broken["stream without an end"] += 1
        return False


async def _read_whole(response: aiohttp.ClientResponse) -> bool:
    json.loads(await response.read())
    return True


def _headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def _code(body: bytes) -> str | None:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return None if code is None else str(code)


def _request(chance: random.Random) -> tuple[str, str, dict[str, object]]:
    """Return a kind of request, its path and its body."""
    is_long, is_stream, is_chat = chance.random() < _LONG_SHARE, chance.random() < 0.6, chance.random() < 0.5
    words = chance.randrange(150, 500) if is_long else chance.randrange(1, 60)
    text = " ".join(chance.choices(_WORDS, k=words))
    body: dict[str, object] = {"model": MODEL, "stream": is_stream, "temperature": chance.choice((0.0, 0.8, 1.2))}
    body["max_tokens"] = chance.randrange(8, 200)
    body["ignore_eos"] = True
    extra = chance.choice(("plain", "plain", "n", "logprobs"))
    if extra == "n":
        body |= {"n": chance.randrange(2, 4), "temperature": 1.0}
    if extra == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    kind = f"{'chat' if is_chat else 'completion'}, {'stream' if is_stream else 'whole'}"
    kind += f", {extra}{', long prompt' if is_long else ''}"
    return kind, "/v1/chat/completions" if is_chat else "/v1/completions", body
