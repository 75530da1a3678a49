"""A loopback server that answers like quire, or with configured errors, for the driver's own tests."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from e2e_support.traffic.client import REPLICA
from e2e_support.traffic.prompts import Kind, Message, Prompt

WORDS = ("The ", "with ", "statement ", "wraps ", "a ", "block", ".")
PROMPT = Prompt(
    name="plain",
    kind=Kind.SHORT,
    text="Explain with.",
    messages=(),
    prompt_tokens=5,
    max_tokens=len(WORDS),
    token_ids=tuple(range(100, 100 + len(WORDS))),
    answer="".join(WORDS),
    finish_reason="length",
    margin=1.0,
    bfloat16_shift=0.0,
)
CHAT = Prompt(
    name="chat",
    kind=Kind.CHAT,
    text=None,
    messages=(Message(role="user", content="Explain with."),),
    prompt_tokens=9,
    max_tokens=40,
    token_ids=(*PROMPT.token_ids, 4),
    answer=PROMPT.answer,
    finish_reason="stop",
    margin=1.0,
    bfloat16_shift=0.0,
)
Event = dict[str, Any]
Twist = Callable[[list[Event | str]], list[Event | str]]
"""A change to the events of a correct answer; a string is sent unchanged."""


def right_events(body: Event) -> list[Event | str]:
    """Return the stream of a working engine."""
    prompt = CHAT if "messages" in body else PROMPT
    head = {"id": "cmpl-1", "model": "demo"}
    events: list[Event | str] = []
    if prompt.is_chat:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events.append({**head, "choices": [opening], "usage": None})
    for number, word in enumerate(WORDS):
        is_last = number == len(WORDS) - 1
        choice: Event = {"index": 0, "finish_reason": prompt.finish_reason if is_last else None}
        choice |= {"delta": {"content": word}} if prompt.is_chat else {"text": word}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(prompt.token_ids[number:]) if is_last else [prompt.token_ids[number]]
        events.append({**head, "choices": [choice], "usage": None})
    return [*events, {**head, "choices": [], "usage": right_usage(prompt)}, "data: [DONE]\n\n"]


def right_usage(prompt: Prompt) -> Event:
    prompt_tokens, completion_tokens = prompt.prompt_tokens, len(prompt.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(slots=True)
class Server:
    """A server. `twist` changes the events of a stream, `handler` replaces the whole answer."""

    url: str = ""
    twist: Twist | None = None
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    pause_seconds: float = 0.0
    """The delay between two events."""
    replica: str = "llm/chat-0"
    """The replica that the next answers name."""
    most_at_once: int = 0
    bodies: list[Event] = field(default_factory=list)
    _running: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await (self.handler or self._right)(request)
        finally:
            self._running -= 1

    async def _right(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        events = right_events(body)
        if not body.get("stream"):
            return web.json_response(whole(body), headers={REPLICA: self.replica})
        if self.twist is not None:
            events = self.twist(events)
        response = await begin(request, self.replica)
        for event in events:
            await response.write(written(event))
            if self.pause_seconds:
                await asyncio.sleep(self.pause_seconds)
        return response


def whole(body: Event) -> Event:
    prompt = CHAT if "messages" in body else PROMPT
    choice: Event = {"index": 0, "finish_reason": prompt.finish_reason}
    choice |= (
        {"message": {"role": "assistant", "content": prompt.answer}} if prompt.is_chat else {"text": prompt.answer}
    )
    return {"id": "cmpl-1", "choices": [choice], "usage": right_usage(prompt)}


def written(event: Event | str) -> bytes:
    return (event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n").encode()


async def begin(request: web.Request, replica: str = "llm/chat-0") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", REPLICA: replica})
    await response.prepare(request)
    return response


@contextmanager
def running() -> Iterator[Server]:
    """Run the server in its own thread, because scenarios are synchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/{kind:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
