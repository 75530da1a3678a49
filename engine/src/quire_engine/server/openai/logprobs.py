"""Logprobs in OpenAI's two shapes: per-token objects for chat, parallel arrays for completions."""

from collections.abc import Sequence
from typing import Any

from quire_engine.ipc.messages import Logprobs
from quire_engine.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON has no infinity: what OpenAI sends for a token that could not be drawn."""


def chat_logprobs(tokenizer: Tokenizer, drawn: Sequence[Logprobs], top: int) -> dict[str, Any]:
    return {"content": [_entry(tokenizer, one, top) for one in drawn], "refusal": None}


def _entry(tokenizer: Tokenizer, one: Logprobs, top: int) -> dict[str, Any]:
    alternatives = zip(one.token_ids[1 : top + 1], one.logprobs[1 : top + 1], strict=True)
    return {
        **_token(tokenizer, one.token_ids[0], one.logprobs[0]),
        "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in alternatives],
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def completion_logprobs(tokenizer: Tokenizer, drawn: Sequence[Logprobs], top: int, first_offset: int) -> dict[str, Any]:
    """``text_offset`` counts characters of the tokens from ``first_offset`` on."""
    tokens, offsets, alternatives = [], [], []
    offset = first_offset
    for one in drawn:
        raw = tokenizer.token_bytes(one.token_ids[0])
        tokens.append(_name(raw))
        offsets.append(offset)
        offset += _length(raw)
        # The drawn token is told even where it is not among the likeliest.
        pairs = zip(one.token_ids[: top + 1], one.logprobs[: top + 1], strict=True)
        alternatives.append({_name(tokenizer.token_bytes(token_id)): max(value, _LOWEST) for token_id, value in pairs})
    return {
        "tokens": tokens,
        "token_logprobs": [max(one.logprobs[0], _LOWEST) for one in drawn],
        "top_logprobs": alternatives if top else None,
        "text_offset": offsets,
    }


def text_length(tokenizer: Tokenizer, drawn: Sequence[Logprobs]) -> int:
    """Characters of the tokens' own texts."""
    return sum(_length(tokenizer.token_bytes(one.token_ids[0])) for one in drawn)


def _length(raw: bytes) -> int:
    return len(raw.decode("utf-8", "ignore"))


def _name(raw: bytes) -> str:
    """A token's text; the bytes of half a character, so that two such tokens keep two names."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
