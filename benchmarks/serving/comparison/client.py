"""The requests of a comparison, and the client that sends them at a fixed concurrency and times the streams.

It counts tokens by the usage that the server reports, because chunks are not tokens. Times are in seconds from the
start of the run.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import aiohttp

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and the number of tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to a request; ``error`` is None if the stream ended as it should."""

    sent: float
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """The times at which tokens arrived."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    requested_tokens: int
    error: str | None = None

    def read(self, event: dict[str, Any], now: float) -> None:
        """Note an event of the stream."""
        if usage := event.get("usage"):
            self.prompt_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        for choice in event.get("choices", ()):
            # A token may decode to no text yet, such as half a character.
            if choice.get("text") or choice.get("finish_reason") is None:
                self.chunks.append(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; a latency without any token is None."""

    requests: int
    errors: dict[str, int]
    short: int
    """The number of answers with fewer tokens than requested."""
    seconds: float
    """From the first request to the end of the last answer."""
    prompt_tokens: int
    output_tokens: int
    ttft_p50: float | None
    itl_p50: float | None
    """The time between two chunks of a stream."""
    tpot_p50: float | None
    """The time per output token after the first one."""


async def run(base_url: str, requests: Sequence[Request], *, concurrency: int) -> list[Answer]:
    """Return the answers to all requests, of which at most ``concurrency`` are sent at a time.

    Each request has a connection of its own, for servers that close connections unannounced.
    """
    started, limit = time.perf_counter(), asyncio.Semaphore(concurrency)
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(base_url=f"{base_url}/", connector=connector, timeout=timeout) as session:

        async def answer(request: Request) -> Answer:
            async with limit:
                found = Answer(sent=time.perf_counter() - started, requested_tokens=request.max_tokens)
                try:
                    await _stream(session, request, found, started)
                except TimeoutError:
                    found.error = f"no complete answer within {_TIMEOUT_SECONDS:g} s"
                except (aiohttp.ClientError, ValueError) as error:
                    found.error = f"{type(error).__name__}: {error}"
                found.end = time.perf_counter() - started
                return found

        return await asyncio.gather(*map(answer, requests))


async def _stream(session: aiohttp.ClientSession, request: Request, answer: Answer, started: float) -> None:
    body = {
        "model": "model",
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post("completions", json=body) as response:
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            return
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                answer.error = f"error in the stream: {event['error']}"
                return
            answer.read(event, time.perf_counter() - started)
    answer.error = "the stream ended without [DONE]"


def summarise(answers: Sequence[Answer]) -> Summary:
    """Return the figures of a run; those of tokens are about the answers without an error."""
    good = [answer for answer in answers if answer.error is None]
    started = [answer for answer in good if answer.chunks]
    gaps = [after - before for answer in good for before, after in pairwise(answer.chunks)]
    per_token = [(a.chunks[-1] - a.chunks[0]) / (a.output_tokens - 1) for a in started if a.output_tokens > 1]
    return Summary(
        requests=len(answers),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None).most_common()),
        short=sum(answer.output_tokens < answer.requested_tokens for answer in good),
        seconds=max(answer.end for answer in answers) - min(answer.sent for answer in answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        output_tokens=sum(answer.output_tokens for answer in good),
        ttft_p50=median(answer.chunks[0] - answer.sent for answer in started) if started else None,
        itl_p50=median(gaps) if gaps else None,
        tpot_p50=median(per_token) if per_token else None,
    )


# --- the requests that every server gets ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload of ``concurrency`` requests at all times, each of ``input_tokens`` in and ``output_tokens`` out."""

    input_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}@{self.concurrency}"


STANDARD = (
    Workload(input_tokens=256, output_tokens=64, concurrency=16),
    Workload(input_tokens=1024, output_tokens=128, concurrency=8),
    Workload(input_tokens=32, output_tokens=128, concurrency=32),
)
QUICK = (Workload(input_tokens=64, output_tokens=32, concurrency=8),)
MIN_ROUNDS, MAX_ROUNDS = 2, 100


def parse_workload(text: str) -> Workload:
    """Return the workload of ``256/64@16``. Raise ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)@(\d+)", text.strip())
    if found is None or "0" in found.groups():
        raise ValueError(f"{text!r} is no workload; write input/output@concurrency, such as 256/64@16")
    sizes = [int(number) for number in found.groups()]
    return Workload(input_tokens=sizes[0], output_tokens=sizes[1], concurrency=sizes[2])


def rounds_for(seconds: float, round_seconds: float) -> int:
    """Return how many rounds of a workload take about ``seconds`` when one takes ``round_seconds``."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / max(round_seconds, 1e-3))))


def requests_of(workload: Workload, *, rounds: int, vocabulary: int, seed: int) -> Sequence[Request]:
    """Return the requests of a seed.

    No two prompts have a common prefix, so that prefix caches find nothing. Token 0, which ends texts in our models,
    does not occur.
    """
    rng, tokens = random.Random(seed), range(1, vocabulary)
    return [
        Request(prompt=tuple(rng.choices(tokens, k=workload.input_tokens)), max_tokens=workload.output_tokens)
        for _ in range(rounds * workload.concurrency)
    ]
