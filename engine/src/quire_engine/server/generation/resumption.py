"""Streams that another engine can continue: the facts that a gateway needs, and how such a request is read.

The next token is a function of the tokens so far, the seed and the position. A gateway that knows the seed and the
tokens can therefore continue a stream on another engine. It asks for them with a header, gets them in comments that it
removes, and repeats the request with a field that contains them.
"""

from collections.abc import Sequence
from hashlib import blake2b
from secrets import randbits
from struct import pack
from time import time
from typing import Any

import msgspec
from starlette.requests import Request

from quire_common.contract.engine import RESUMABLE_HEADER, RESUME_COMMENT, RESUME_FIELD, TOKENS_COMMENT
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.http import sse

_REFUSED = "not_resumable"
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
"""The routes of such streams. The ids of a response and its items are random, so that another engine cannot go on."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that continue a stream; a gateway stores all but the tokens as they are."""

    seed: int
    created: int
    """The time of the first attempt in Unix seconds, which all chunks of an answer repeat."""
    prompt: str
    """A digest of the token ids of the prompt, which must be the same."""
    token_ids: list[int] = []
    """The tokens whose events the client has."""


def take_resumption(request: Request, content: dict[str, Any]) -> Resumption | None:
    """Remove the field of a gateway from a body and return its value. Raise InvalidRequest if it is malformed.

    Without the header of a gateway, the field is unknown and stays.
    """
    if RESUMABLE_HEADER not in request.headers or RESUME_FIELD not in content:
        return None
    try:
        return msgspec.convert(content.pop(RESUME_FIELD), Resumption)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{RESUME_FIELD}: {error}", param=RESUME_FIELD) from error


def obstacle(path: str, choices: Sequence[Choice], params: SamplingParams) -> str | None:
    """Return the property of a request for which its stream cannot be continued elsewhere; None if it can."""
    if path not in _PATHS:
        return f"an answer of {path}"
    if len(choices) > 1:
        return "several answers"
    if params.logprobs is not None:
        return "logprobs"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    if params.reasoning_phase is not None:
        return "a budget of reasoning"
    return None if params.grammar is None else "a grammar"


def checked(
    path: str, resumption: Resumption, choices: Sequence[Choice], params: SamplingParams, *, vocab_size: int
) -> None:
    """Raise InvalidRequest if the stream cannot be continued here."""
    reason = obstacle(path, choices, params)
    ids = resumption.token_ids
    if reason is not None:
        message = f"a stream with {reason} cannot be continued"
    elif resumption.prompt != digest_of(choices[0].prompt_token_ids):
        message = "the prompt has other tokens here; continue the stream on an engine with the same model and template"
    elif len(ids) >= params.max_tokens:
        message = f"{len(ids)} tokens leave none of the {params.max_tokens} that the answer may have"
    elif any(not 0 <= id_ < vocab_size for id_ in ids):
        message = f"a token id is not below {vocab_size}"
    elif not -(2**63) <= resumption.seed < 2**63:
        message = "the seed is not an integer of 64 bits"
    else:
        return
    raise InvalidRequest(f"{RESUME_FIELD}: {message}", param=RESUME_FIELD, code=_REFUSED)


def started(prompt_token_ids: Sequence[int], seed: int | None) -> Resumption:
    """Return the facts of a stream that starts now."""
    return Resumption(
        seed=randbits(63) if seed is None else seed, created=int(time()), prompt=digest_of(prompt_token_ids)
    )


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids."""
    return blake2b(pack(f"<{len(token_ids)}q", *token_ids), digest_size=16).hexdigest()


class TokenMarks:
    """The comments of one stream that a gateway keeps: the facts at its start, and the tokens after their events."""

    def __init__(self, resumption: Resumption) -> None:
        self._start = resumption
        self._ids: list[int] = []

    def start(self) -> bytes:
        """Return the first comment."""
        facts = msgspec.structs.replace(self._start, token_ids=[])
        return sse.comment(RESUME_COMMENT, facts)

    def mark(self, deltas: Sequence[Delta], events: bytes) -> bytes:
        """Return the comment after the events of these deltas; deltas without an event wait for the next one."""
        for delta in deltas:
            self._ids += delta.token_ids
        if not events:
            return b""
        ids, self._ids = self._ids, []
        return sse.comment(TOKENS_COMMENT, ids)
