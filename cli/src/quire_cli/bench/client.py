"""Sends a workload to an OpenAI-compatible address and times what comes back.

Open loop (``Conversation.arrival_seconds`` counts, nothing waits for answers) or closed loop (so many conversations at
a time). Every request streams; its usage is asked for, because chunks are not tokens.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from quire_cli.bench.summary import MeasuredRequest
from quire_cli.bench.workload import Conversation, Turn

Endpoint = Literal["completions", "chat"]
_MOST_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go and what they all carry. ``base_url`` ends in ``/v1``."""

    base_url: str
    model: str
    endpoint: Endpoint
    api_key: str | None = None
    ignore_eos: bool = True
    """Ask for exactly ``max_tokens`` tokens: an extension of vLLM, SGLang, llama.cpp and quire, not OpenAI's."""
    temperature: float = 0.0
    timeout_seconds: float = 600.0


class UnexpectedAnswer(Exception):
    """The server answered, but not with a complete stream. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Stream:
    """The part of an answer that has arrived."""

    arrivals: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        usage = event.get("usage")
        if usage:
            self.prompt_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            # A token may decode to no text yet (half a character); a completion's chunk counts even so. The first chunk
            # of a chat carries the role alone and does not.
            if piece or (choice.get("text") is not None and choice.get("finish_reason") is None):
                self.arrivals.append(now)
                self.pieces.append(piece or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def discover_model(session: aiohttp.ClientSession, base_url: str) -> list[str]:
    """Return the ids under ``/v1/models``. Raises aiohttp.ClientError, TimeoutError, UnexpectedAnswer."""
    async with session.get(f"{base_url}/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
        if response.status != 200:
            raise UnexpectedAnswer(await _message(response), response.status)
        return [model["id"] for model in (await response.json())["data"]]


def open_session(api_key: str | None, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """Return a session without a limit on connections, because the workload limits the load.

    Without ``keep_alive`` each request has its own connection, for servers that close connections unannounced.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=not keep_alive), headers=headers)


async def run(
    session: aiohttp.ClientSession,
    target: Target,
    workload: Sequence[Conversation],
    *,
    concurrency: int | None,
    on_sent: Callable[[], None],
    on_done: Callable[[MeasuredRequest], None],
) -> list[MeasuredRequest]:
    """All outcomes, in order of completion; times count from the start of the run.

    With ``concurrency`` at most so many conversations are under way; without, each starts at its arrival time.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency is not None else None
    started = time.perf_counter()
    outcomes: list[MeasuredRequest] = []

    async def one(conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, conversation.arrival_seconds - (time.perf_counter() - started)))
        if gate is None:
            await converse(conversation)
        else:
            async with gate:
                await converse(conversation)

    async def converse(conversation: Conversation) -> None:
        messages: list[dict[str, str]] = []
        prompt: list[int] = []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.text})
            prompt.extend(turn.prompt_token_ids)
            on_sent()
            stream, outcome = await _ask(session, target, messages, prompt, turn, started)
            outcomes.append(outcome)
            on_done(outcome)
            if outcome.error is not None:
                return
            messages.append({"role": "assistant", "content": "".join(stream.pieces)})

    async with asyncio.TaskGroup() as group:
        for conversation in workload:
            group.create_task(one(conversation))
    return outcomes


async def _ask(
    session: aiohttp.ClientSession,
    target: Target,
    messages: list[dict[str, str]],
    prompt: list[int],
    turn: Turn,
    started: float,
) -> tuple[_Stream, MeasuredRequest]:
    stream = _Stream()
    error = None
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout_seconds):
            await _stream(session, target, _body(target, messages, prompt, turn), stream)
    except UnexpectedAnswer as problem:
        error, stream.status = str(problem), problem.status
    except TimeoutError:
        error = f"no complete answer within {target.timeout_seconds:g} s"
    except aiohttp.ClientError as problem:
        error = f"{type(problem).__name__}: {problem}"
    end = stream.arrivals[-1] if error is None and stream.arrivals else time.perf_counter()
    gaps = tuple(later - earlier for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False))
    return stream, MeasuredRequest(
        sent_seconds=sent - started,
        first_token_seconds=stream.arrivals[0] - started if stream.arrivals else None,
        end_seconds=end - started,
        chunk_gaps_seconds=gaps,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        requested_tokens=turn.max_tokens,
        finish_reason=stream.finish_reason,
        status=stream.status,
        error=error,
    )


def _body(target: Target, messages: list[dict[str, str]], prompt: list[int], turn: Turn) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": turn.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | ({"messages": messages} if target.endpoint == "chat" else {"prompt": prompt})


async def _stream(session: aiohttp.ClientSession, target: Target, body: dict[str, Any], stream: _Stream) -> None:
    path = "chat/completions" if target.endpoint == "chat" else "completions"
    # No timeout of aiohttp's own: its default of five minutes would cut long runs, and ours covers the whole.
    async with session.post(
        f"{target.base_url}/{path}", json=body, timeout=aiohttp.ClientTimeout(total=None)
    ) as response:
        stream.status = response.status
        if response.status != 200:
            raise UnexpectedAnswer(await _message(response), response.status)
        async for data in _events(response.content):
            if data == b"[DONE]":
                return
            error = _take(stream, data)
            if error is not None:
                message = error.get("message", error) if isinstance(error, dict) else error
                raise UnexpectedAnswer(f"error in the stream: {message}", 200)
    raise UnexpectedAnswer("the stream ended without [DONE]", 200)


def _take(stream: _Stream, data: bytes) -> object:
    """Read one event; return the error in it, None without one. Raises UnexpectedAnswer if it has another shape."""
    try:
        event = json.loads(data)
        error: object = event.get("error")
        if error is None:
            stream.take(event, time.perf_counter())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shown = data[:_MOST_SHOWN_BYTES].decode("utf-8", "replace")
        raise UnexpectedAnswer(f"an event of the stream cannot be read: {shown}", 200) from None
    return error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event once its line is complete; a read may return several or half of one."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _message(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(4096)).decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"HTTP {response.status}: {' '.join(str(text).split())[:300]}"
