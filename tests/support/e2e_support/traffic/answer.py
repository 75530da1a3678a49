"""Check of one answer, event by event. Pure: the client handles bytes and times.

An `Answer` receives every event of a stream (or one complete body) and raises `Wrong` at the first deviation: a wrong,
repeated or missing token or text, an invented or repeated end, or wrong counts. `Wrong` names the position. No scenario
may permit it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from e2e_support.traffic.prompts import Prompt

_SHOWN = 24
"""The number of characters shown around a difference."""


class Form(StrEnum):
    """The form of the request."""

    STREAM = "stream"
    """A stream with text only, as any client requests."""
    STREAM_TOKENS = "stream-tokens"
    """A stream with the token ids of each chunk (vLLM's `return_token_ids`), which shows missing or repeated tokens.
    """
    WHOLE = "whole"
    """A complete body without streaming."""


class Wrong(Exception):
    """An answer that deviates from the expected one."""


class BrokenOff(Exception):
    """An error event: the server reported in the stream that it cannot continue."""


class Answer:
    """One answer while it arrives."""

    def __init__(self, prompt: Prompt, form: Form, beyond: int = 0) -> None:
        """Store the expectation. `beyond` additional tokens follow the known ones; they are counted, not compared."""
        assert not beyond or prompt.finish_reason == "length", "what the model ended itself does not go on"
        self._prompt, self._form, self._beyond = prompt, form, beyond
        self._num_tokens = len(prompt.token_ids) + beyond
        self._place = 0
        """The position in the expected text."""
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._id: str | None = None
        self.chunks = 0
        """The number of events with text or tokens."""
        self.tokens = 0
        """The token ids of the answer, if reported."""

    def take(self, event: Mapping[str, Any]) -> bool:
        """Process one event of a stream. Return True if it contained a part of the answer. Raise Wrong or BrokenOff."""
        if "error" in event:
            error = event["error"]
            raise BrokenOff(f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error))
        self._check_id(event)
        choices = event.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise Wrong(f"event {self.chunks}: expected one choice or none, got {str(choices)[:200]}")
        if not choices:
            self._take_usage(event.get("usage"))
            return False
        if event.get("usage") is not None:
            raise Wrong(f"chunk {self.chunks}: usage in a chunk that has a choice")
        return self._take_choice(choices[0], "delta")

    def take_whole(self, body: Mapping[str, Any]) -> None:
        """Check a complete body. Raise Wrong on a deviation."""
        choices = body.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise Wrong(f"expected one choice, got {str(choices)[:200]}")
        self._take_choice(choices[0], "message")
        self._take_usage(body.get("usage"))
        self.end()

    def end(self) -> None:
        """Check the end, after `[DONE]` or of a complete body. Raise Wrong if a part is missing."""
        if self._finish_reason is None:
            raise Wrong(f"it ended without a finish_reason, {self._progress()}")
        if self._usage is None:
            raise Wrong("it ended without usage")

    def cut(self) -> Wrong:
        """Return what is wrong with a stream whose body ended properly but without `[DONE]`."""
        return Wrong(f"the stream ended without [DONE], {self._progress()}: a client may take it for a whole answer")

    def _take_choice(self, choice: Mapping[str, Any], holder: str) -> bool:
        if self._finish_reason is not None:
            raise Wrong(f"chunk {self.chunks}: another chunk after finish_reason {self._finish_reason!r}")
        inner = choice.get(holder) or {}
        text = (inner.get("content") if self._prompt.is_chat else choice.get("text")) or ""
        self._take_text(text)
        brought = bool(text)
        if self._form is Form.STREAM_TOKENS and not self._is_opening(inner):
            brought |= self._take_tokens(choice.get("token_ids"))
        self.chunks += brought
        self._finish_reason = choice.get("finish_reason")
        if self._finish_reason is not None:
            self._check_finish(self._finish_reason)
        return brought

    def _is_opening(self, inner: Mapping[str, Any]) -> bool:
        """Return True for the first event of a chat, which contains only the role."""
        return self._prompt.is_chat and "role" in inner

    def _take_text(self, text: str) -> None:
        expected = self._prompt.answer
        known = text[: max(0, len(expected) - self._place)] if self._beyond else text
        if known and not expected.startswith(known, self._place):
            raise Wrong(f"chunk {self.chunks}: {_departure(expected, self._place, known)}")
        self._place += len(text)

    def _take_tokens(self, token_ids: Any) -> bool:
        expected = self._prompt.token_ids
        if not isinstance(token_ids, list):
            raise Wrong(f"chunk {self.chunks}: no token_ids, though they were asked for")
        for token_id in token_ids:
            right = expected[self.tokens] if self.tokens < len(expected) else None
            free = len(expected) <= self.tokens < self._num_tokens
            if token_id != right and not free:
                where = f"chunk {self.chunks}, token {self.tokens} of {self._num_tokens}"
                raise Wrong(f"{where}: expected {'none' if right is None else right}, got {token_id}")
            self.tokens += 1
        return bool(token_ids)

    def _check_finish(self, reason: str) -> None:
        prompt = self._prompt
        if reason != prompt.finish_reason:
            raise Wrong(f"finish_reason {reason!r} instead of {prompt.finish_reason!r}, {self._progress()}")
        if self._place < len(prompt.answer):
            raise Wrong(f"finish_reason {reason!r} of a text cut short, {self._progress()}")
        if self._form is Form.STREAM_TOKENS and self.tokens < self._num_tokens:
            raise Wrong(f"finish_reason {reason!r} after {self.tokens} of {self._num_tokens} tokens")

    def _take_usage(self, usage: Any) -> None:
        if self._usage is not None:
            raise Wrong("usage was reported twice")
        if self._finish_reason is None:
            raise Wrong(f"usage before finish_reason, {self._progress()}")
        if not isinstance(usage, dict):
            raise Wrong(f"no usage, though it was asked for: {usage!r}")
        prompt, completion = self._prompt.prompt_tokens, self._num_tokens
        right = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        wrong = {name: (usage.get(name), value) for name, value in right.items() if usage.get(name) != value}
        if wrong:
            raise Wrong("; ".join(f"usage.{name} {got} instead of {value}" for name, (got, value) in wrong.items()))
        self._usage = usage

    def _check_id(self, event: Mapping[str, Any]) -> None:
        given = event.get("id")
        if self._id is not None and given != self._id:
            raise Wrong(f"chunk {self.chunks}: id {given!r} in the stream of {self._id!r}")
        self._id = given

    def _progress(self) -> str:
        return f"{self._place} of {len(self._prompt.answer)} characters received"


def _departure(expected: str, place: int, text: str) -> str:
    """Describe where a text deviates from the expected one."""
    rest = expected[place : place + len(text)]
    same = next((i for i, (a, b) in enumerate(zip(rest, text, strict=False)) if a != b), min(len(rest), len(text)))
    at = place + same
    got = text[same : same + _SHOWN]
    if at >= len(expected):
        return f"text beyond the expected end at character {at}: {got!r}"
    said = f"at character {at} expected {expected[at : at + _SHOWN]!r}, got {got!r}"
    if place and expected[:place].endswith(text):
        return f"{said} (the piece before, again)"
    if text and expected.find(text, place) >= 0:
        return f"{said} (which comes {expected.find(text, place) - place} characters later: a piece is missing)"
    return said


def body_of(prompt: Prompt, form: Form, beyond: int, *, model: str, salt: str | None) -> dict[str, Any]:
    """Return the body of a request. A `salt` separates it from cached blocks of others."""
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.max_tokens + beyond, "temperature": 0}
    body |= prompt.request
    if beyond:
        body["ignore_eos"] = True
    if form is not Form.WHOLE:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if form is Form.STREAM_TOKENS:
        body["return_token_ids"] = True
    if salt is not None:
        body["cache_salt"] = salt
    return body
