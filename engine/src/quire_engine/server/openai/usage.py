"""Token counts in OpenAI's shape, where and when a request asks for them."""

from collections.abc import Sequence
from typing import Any

from quire_engine.server.generation.choice import Choice
from quire_engine.server.http import sse
from quire_engine.server.openai.schemas import StreamOptions


class UsageReport:
    """Of one request's answers, ``per_prompt`` to each prompt. A prompt counts once, however many answers it got."""

    def __init__(self, choices: Sequence[Choice], per_prompt: int, options: StreamOptions | None) -> None:
        self._choices = choices
        self._firsts = choices[::per_prompt]
        self._at_end = bool(options and options.include_usage)
        self.in_every_chunk = bool(options and options.continuous_usage_stats)

    def now(self) -> dict[str, Any]:
        prompt = sum(len(choice.prompt_token_ids) for choice in self._firsts)
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in self._firsts)},
        }

    def chunk_fields(self) -> dict[str, Any]:
        """What a chunk says of usage: nothing, unless it was asked for."""
        if self.in_every_chunk:
            return {"usage": self.now()}
        return {"usage": None} if self._at_end else {}

    def last_events(self, head: dict[str, Any]) -> bytes:
        """The end of a stream: the usage of all of it if asked for, in a chunk without answers."""
        if not self._at_end:
            return sse.DONE
        return sse.event({**head, "choices": [], "usage": self.now()}) + sse.DONE
