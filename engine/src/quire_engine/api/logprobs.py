"""Logprobs in OpenAI's two forms (objects for chat, parallel arrays for completions) and in vLLM's for prompts."""

import codecs
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from quire_engine.core.batch import TokenLogprobs
from quire_engine.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""OpenAI's value for a token that cannot be sampled, because JSON has no infinity."""


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """Return the logprobs of sampled tokens for a chat, each with those of the ``top`` likeliest."""
    return {"content": [_entry(tokenizer, one, top) for one in sampled], "refusal": None}


def _entry(tokenizer: Tokenizer, one: TokenLogprobs, top: int) -> dict[str, Any]:
    alternatives = zip(one.token_ids[1 : top + 1], one.logprobs[1 : top + 1], strict=True)
    return {
        **_token(tokenizer, one.token_ids[0], one.logprobs[0]),
        "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in alternatives],
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any] | None]:
    """Return an object per token of the prompt with the token itself and the likeliest by id; None for the first."""
    return [None, *(_prompt_entry(tokenizer, one, top) for one in entries)]


def _prompt_entry(tokenizer: Tokenizer, one: TokenLogprobs, top: int) -> dict[str, Any]:
    shown = zip(one.token_ids[: top + 1], one.logprobs[: top + 1], (one.rank, *range(1, top + 1)), strict=True)
    return {
        str(token_id): {
            "logprob": max(logprob, _LOWEST),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in shown
    }


class CompletionLogprobs:
    """The arrays of one answer, reported as it grows. ``text_offset`` is the place in the text where a token begins.

    ``before`` contains the first bytes of a character that the prompt leaves incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, before: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(before)
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs], text: str) -> dict[str, Any]:
        """Return the arrays of a prompt that the answer echoes as ``text``; this precedes every other call."""
        arrays = self._arrays(token_ids, chain((None,), entries))
        # A tokenizer may omit a space at the start of the whole text.
        shift = max(0, self._offset - len(text))
        arrays["text_offset"] = [max(0, offset - shift) for offset in arrays["text_offset"]]
        self._offset = len(text)
        return arrays

    def of_sampled(self, sampled: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the arrays of the tokens that were sampled next."""
        return self._arrays([one.token_ids[0] for one in sampled], sampled)

    def _arrays(self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None]) -> dict[str, Any]:
        tokens, offsets, values, alternatives = [], [], [], []
        for token_id, one in zip(token_ids, entries, strict=True):
            raw = self._tokenizer.token_bytes(token_id)
            tokens.append(_name(raw))
            offsets.append(self._offset)
            if token_id not in self._skip:
                self._offset += len(self._utf8.decode(raw))
            values.append(None if one is None else max(one.logprobs[0], _LOWEST))
            alternatives.append(None if one is None else self._likeliest(one))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _likeliest(self, one: TokenLogprobs) -> dict[str, float]:
        """Return the logprobs of the likeliest tokens, and of the token itself even if it is not among them."""
        pairs = zip(one.token_ids[: self._top + 1], one.logprobs[: self._top + 1], strict=True)
        return {_name(self._tokenizer.token_bytes(token_id)): max(value, _LOWEST) for token_id, value in pairs}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of two runs of tokens that follow each other."""
    return {name: None if first[name] is None else first[name] + second[name] for name in first}


def _name(raw: bytes) -> str:
    """Return a token's text, or its bytes where these are half a character, so that two such tokens differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
