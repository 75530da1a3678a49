"""Checks of a request against the model and against itself: vocabulary, length, sizes, contradictions.

They are pure functions; ``schemas`` has checked types and ranges before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from quire_engine.api.context import Context
from quire_engine.api.generation import QueueLimit
from quire_engine.api.schemas import GenerationRequest
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest

_MAX_PROMPT_ENTRIES = 250_000
"""The most prompt logprobs in one response: about 20 MB of JSON."""
_CHARACTERS_PER_TOKEN = 256
"""More than the average of any text: the longest existing tokens stand for about a hundred spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits that the model and the server set for a request."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    first_token_id: int | None
    """The token that the tokenizer puts before every prompt; None if it puts none there."""
    priorities: bool
    """True if the scheduler of this server uses priorities."""

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the limits of a server and its running engine. Raises Unavailable while there is no engine."""
        ready = context.ready()
        return cls(
            max_model_len=ready.max_model_len,
            vocab_size=context.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_logprobs=context.options.max_logprobs,
            first_token_id=context.tokenizer.first_token_id,
            priorities=context.priorities,
        )


def check_against_model(request: GenerationRequest, logprobs: int | None, limits: ModelLimits) -> None:
    """Raise InvalidRequest for token ids, logprobs or a priority that this model and server do not accept."""
    for name, ids in (
        ("logit_bias", request.logit_bias or {}),
        ("stop_token_ids", request.stop_token_ids or []),
        ("allowed_token_ids", request.allowed_token_ids or []),
    ):
        beyond = next((token_id for token_id in ids if token_id >= limits.vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(
                f"{name}: {beyond} is not a token id of this model; the highest is {limits.vocab_size - 1}", param=name
            )
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequest(
                f"{name}: {count} exceeds the limit of {limits.max_logprobs} (--max-logprobs)", param=name
            )
    check_priority(request.priority, used=limits.priorities)


def check_priority(priority: int, *, used: bool) -> None:
    """Raise InvalidRequest for a priority on a server whose scheduler does not use priorities."""
    if priority != 0 and not used:
        raise InvalidRequest(
            "priority: only 0 is accepted, because this server runs requests in order of arrival; start it with "
            "--scheduling-policy priority to use priorities",
            param="priority",
        )


def longest_text(max_model_len: int) -> int:
    """Return the number of characters above which no text fits into the model's context."""
    return max_model_len * _CHARACTERS_PER_TOKEN


def check_length(texts: Sequence[str], param: str, max_model_len: int) -> None:
    """Raise InvalidRequest for a text that is far too long, before time is spent on encoding it."""
    longest = max(map(len, texts), default=0)
    if longest > longest_text(max_model_len):
        raise InvalidRequest(
            f"{param}: a prompt of {longest} characters exceeds this model's context of {max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )


def check_lengths(content: Mapping[str, Any], max_model_len: int, queue: QueueLimit) -> None:
    """Raise InvalidRequest for arrays that are too long for any request, by their lengths alone.

    A message costs at least one token.
    """
    prompt = content.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        queue.check_count(len(prompt))
    truncated = content.get("truncate_prompt_tokens") is not None
    prompts = [] if truncated or not isinstance(prompt, list) else [prompt]
    if prompts and prompts[0] and isinstance(prompts[0][0], list | str):
        prompts = [one for one in prompts[0] if isinstance(one, list)]
    named: list[tuple[str, str, Any]] = [("prompt", "tokens", one) for one in prompts]
    named += [(name, name, content.get(name)) for name in ("messages", "input", "tokens")]
    for name, kind, items in named:
        if isinstance(items, list) and len(items) > max_model_len:
            raise InvalidRequest(
                f"{name}: {len(items)} {kind} exceed this model's context of {max_model_len} tokens",
                param=name,
                code="context_length_exceeded",
            )


def check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    """Raise InvalidRequest for parameters that contradict one another."""
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens: {sampling.min_tokens} exceeds the limit of {sampling.max_tokens} tokens for the answer",
            param="min_tokens",
        )
    forbidden = {word[-1] for word in sampling.bad_words_token_ids}
    if sampling.min_tokens:
        forbidden |= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else limits.eos_token_ids)}
    if sampling.allowed_token_ids is not None and forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: bad_words, or min_tokens with the stop tokens, may forbid all of them",
            param="allowed_token_ids",
        )
    if len(forbidden) >= limits.vocab_size:
        raise InvalidRequest("bad_words: the words may forbid every token of this model", param="bad_words")


def check_reasoning(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for a budget of reasoning if the end tag, then the only token allowed, may be forbidden."""
    phase, allowed = sampling.reasoning_phase, sampling.allowed_token_ids
    if phase is None or phase.budget is None:
        return
    may_begin = phase.optional and (allowed is None or phase.start_token_id in allowed)
    if not phase.opened and not may_begin:
        return
    end = phase.end_token_id
    # A grammar begins after the reasoning, and keeps min_tokens itself.
    too_early = sampling.min_tokens > phase.budget and sampling.grammar is None
    for param, forbids in (
        ("allowed_token_ids", allowed is not None and end not in allowed),
        ("bad_words", any(word[-1] == end for word in sampling.bad_words_token_ids)),
        ("min_tokens", too_early and end in sampling.stop_token_ids),
    ):
        if forbids:
            raise InvalidRequest(
                f"{param}: may forbid token {end}, the end of the reasoning, which must follow once "
                "thinking_token_budget is used up; permit this token, or send only one of the two",
                param=param,
            )


def check_report_size(prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, times: int) -> None:
    """Raise InvalidRequest for more prompt logprobs than a response may contain.

    ``times`` is the number of answers that report those of each prompt.
    """
    if sampling.prompt_logprobs is None:
        return
    entries = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs) * times
    if entries > _MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs: the response would contain {entries} entries (prompt tokens, times logprobs per token, "
            f"times answers); at most {_MAX_PROMPT_ENTRIES} are accepted",
            param="prompt_logprobs",
        )


def check_token_ids(token_ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raise InvalidRequest for a token id beyond the vocabulary."""
    if token_ids and (highest := max(token_ids)) >= vocab_size:
        raise InvalidRequest(
            f"{param}: {highest} is not a token id of this model; the highest is {vocab_size - 1}", param=param
        )


def checked_prompt(
    prompt: list[int], request: GenerationRequest, reserved: int | None, limits: ModelLimits
) -> list[int]:
    """Return the prompt, truncated if the request demands it. Raises InvalidRequest.

    ``reserved`` is the room for the answer that a truncation to the model's context leaves; None reserves one token.
    """
    if not prompt:
        raise InvalidRequest("prompt: is empty; it should have at least one token", param="prompt")
    check_token_ids(prompt, "prompt", limits.vocab_size)
    kept = request.truncate_prompt_tokens
    if kept == -1:
        kept = max(1, limits.max_model_len - max(1, reserved or 1))
    return prompt if kept is None else _truncated(prompt, kept, request.truncation_side, limits.first_token_id)


def _truncated(prompt: list[int], kept: int, side: str | None, first_token_id: int | None) -> list[int]:
    """Return ``kept`` tokens of the prompt.

    A token that the tokenizer puts before every prompt stays first, because models need it there.
    """
    if len(prompt) <= kept:
        return prompt
    if side == "right":
        return prompt[:kept]
    if kept > 1 and prompt[0] == first_token_id:
        return [prompt[0], *prompt[1 - kept :]]
    return prompt[-kept:]


def token_limit(
    prompts: Sequence[Sequence[int]], requested: int | None, default: int | None, limits: ModelLimits, *, param: str
) -> list[int]:
    """Return for each prompt how many tokens may follow it. Raises InvalidRequest where the context has no room.

    ``requested`` is the client's limit, and ``default`` applies without one; both are cut to the room in the model's
    context. ``param`` is the field that contains the prompts.
    """
    allowed = []
    for prompt in prompts:
        room = limits.max_model_len - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"{param}: {len(prompt)} tokens of the prompt exceed this model's context of {limits.max_model_len} "
                "tokens, of which the answer needs at least one",
                param=param,
                code="context_length_exceeded",
            )
        allowed.append(min(room, (default or room) if requested is None else requested))
    return allowed
