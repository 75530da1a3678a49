"""One answer of very many tokens, judged as it comes in. Pure; ``long_streams`` asks for it.

No reference knows so long an answer token by token: its beginning is a prompt's committed answer and must be that, and
all of it must be as many tokens as were asked for, told once each, with an end that says so.
"""

from collections.abc import Mapping
from typing import Any

from e2e_support.traffic.prompts import Prompt

JSON = Mapping[str, Any]


class Cut(Exception):
    """The answer is not whole, or not right; the message says where."""


class LongAnswer:
    """Fed with every event, in order."""

    def __init__(self, prompt: Prompt, tokens: int) -> None:
        self._prompt, self._wanted = prompt, tokens
        self.tokens = 0
        self._finish: str | None = None
        self._told: int | None = None

    def take(self, event: JSON) -> None:
        """Raises ``Cut`` for an error event, and for what cannot follow what came before."""
        if "error" in event:
            raise Cut(f"after {self.tokens} tokens the server said: {event['error']}")
        for choice in event.get("choices", []):
            self._take_choice(choice)
        if event.get("usage"):
            self._told = event["usage"]["completion_tokens"]

    def end(self) -> None:
        """After [DONE], or what else ended the stream. Raises ``Cut`` for what is missing."""
        if self._finish != "length":
            raise Cut(f"after {self.tokens} of {self._wanted} tokens it ended with finish_reason {self._finish}")
        if (self.tokens, self._told) != (self._wanted, self._wanted):
            raise Cut(f"{self._wanted} tokens were asked for, {self.tokens} came, usage says {self._told}")

    def body(self, model: str) -> dict[str, Any]:
        """The request."""
        return {
            "model": model,
            "max_tokens": self._wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self._prompt.request,
        }

    def _take_choice(self, choice: JSON) -> None:
        if self._finish is not None:
            raise Cut(f"more came after finish_reason {self._finish}")
        for token in choice.get("token_ids") or []:
            known = self._prompt.token_ids
            if self.tokens < len(known) and token != known[self.tokens]:
                raise Cut(f"token {self.tokens} is {token}, right is {known[self.tokens]}")
            self.tokens += 1
        self._finish = choice.get("finish_reason")
