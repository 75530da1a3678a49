"""Sending a request and reading its answer, whole or streamed, in one form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.serving.differential.asked import Asked

_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The status, the content (a stream's is joined), and the message of an error."""

    status: int
    content: Any = None
    message: str = ""


async def answer(client: aiohttp.ClientSession, base_url: str, asked: Asked) -> Answer:
    """Send a request. A connection that fails is an answer with status 0."""
    text = asked.body if isinstance(asked.body, str) else json.dumps(asked.body)
    headers = {"Content-Type": "application/json"}
    limit = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with client.post(f"{base_url}{asked.path}", data=text, headers=headers, timeout=limit) as response:
            body = await response.text()
            if response.content_type == "text/event-stream":
                return joined(response.status, events(body))
            return whole(response.status, body)
    except (aiohttp.ClientError, TimeoutError) as error:
        return Answer(status=0, message=f"{type(error).__name__}: {error}")


def whole(status: int, body: str) -> Answer:
    """Return the answer of a body that is not a stream."""
    try:
        content = json.loads(body)
    except ValueError:
        return Answer(status=status, message=body[:200])
    if status == 200:
        return Answer(status=status, content=content)
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", "") if isinstance(error, dict) else str(error)
    return Answer(status=status, message=str(message)[:200])


def events(body: str) -> list[Any]:
    """Return the data of a stream's events, without the mark of its end."""
    lines = [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(status: int, chunks: Sequence[Mapping[str, Any]]) -> Answer:
    """Join a stream's chunks: texts and logprobs are appended, everything else is the last value that was not null."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        if "error" in chunk:
            return Answer(status=status, content={"error": "in the stream"}, message=str(chunk["error"])[:200])
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            _join(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
    content = {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
    return Answer(status=status, content=content)


def _join(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if value is None or name == "index":
            continue
        if isinstance(value, Mapping):
            _join(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into.setdefault(name, []).extend(value)
        elif name in ("text", "content", "reasoning_content"):
            into[name] = into.get(name, "") + value
        else:
            into[name] = value
