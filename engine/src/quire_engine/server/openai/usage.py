"""Token counts in OpenAI's form, where a request asks for them."""

from collections.abc import Callable, Sequence
from typing import Any

from quire_engine.server.generation.choice import Choice
from quire_engine.server.http import sse
from quire_engine.server.openai.schemas import StreamOptions


class UsageReport:
    """The usage of one request with ``per_prompt`` answers to each prompt; a prompt counts once for all of them."""

    def __init__(self, choices: Sequence[Choice], per_prompt: int, options: StreamOptions | None) -> None:
        self._choices = choices
        self._firsts = choices[::per_prompt]
        self._at_end = bool(options and options.include_usage)
        self.reasoning_tokens: Callable[[], int] | None = None
        """The number of tokens of reasoning so far, if the model's format of reasoning has tags that can be counted."""
        self.in_every_chunk = bool(options and options.continuous_usage_stats)

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        prompt = sum(len(choice.prompt_token_ids) for choice in self._firsts)
        completion = sum(choice.num_tokens for choice in self._choices)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in self._firsts)},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens()}
        return counts

    def chunk_fields(self) -> dict[str, Any]:
        """Return the fields of a chunk that concern the usage: none, unless the request asks for them."""
        if self.in_every_chunk:
            return {"usage": self.usage()}
        return {"usage": None} if self._at_end else {}

    def last_events(self, head: dict[str, Any]) -> bytes:
        """Return the end of a stream, with the total usage in a chunk without answers if the request asks for it."""
        if not self._at_end:
            return sse.DONE
        return sse.event({**head, "choices": [], "usage": self.usage()}) + sse.DONE
