"""What a request must keep to in the light of the model and of itself: vocabulary, length, sizes, contradictions.

Pure. ``schemas`` has checked types and ranges before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.server.context import Context
from quire_engine.server.openai.schemas import GenerationRequest

_MAX_PROMPT_ENTRIES = 250_000
"""Some 20 MB of JSON."""
_CHARACTERS_PER_TOKEN = 256
"""More than any text has on average: the longest tokens there are stand for some hundred spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request must keep to."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    priorities: bool
    """Whether requests have priorities here."""

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the limits of the running engine. Raises Unavailable while there is none."""
        ready = context.ready()
        return cls(
            max_model_len=ready.max_model_len,
            vocab_size=context.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_logprobs=context.options.max_logprobs,
            priorities=context.priorities,
        )


def check_against_model(request: GenerationRequest, logprobs: int | None, limits: ModelLimits) -> None:
    """Raises InvalidRequest."""
    for name, ids in (
        ("logit_bias", request.logit_bias or {}),
        ("stop_token_ids", request.stop_token_ids or []),
        ("allowed_token_ids", request.allowed_token_ids or []),
    ):
        beyond = next((token_id for token_id in ids if token_id >= limits.vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(
                f"{name}: {beyond} is not a token of this model, whose ids end at {limits.vocab_size - 1}", param=name
            )
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequest(
                f"{name}: {count} are asked for, at most {limits.max_logprobs} are given (--max-logprobs)", param=name
            )
    if request.priority != 0 and not limits.priorities:
        raise InvalidRequest(
            "priority: this server runs requests in order of arrival; it would need --scheduling-policy priority",
            param="priority",
        )


def check_length(texts: Sequence[str], param: str, limits: ModelLimits) -> None:
    """Raises InvalidRequest for a text that is too long by far, before any time is spent on encoding it."""
    longest = max(map(len, texts), default=0)
    if longest > limits.max_model_len * _CHARACTERS_PER_TOKEN:
        raise InvalidRequest(
            f"this model's context is {limits.max_model_len} tokens; a prompt of {longest} characters is longer",
            param=param,
            code="context_length_exceeded",
        )


def check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    """Raises InvalidRequest where the parameters contradict one another."""
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens: is {sampling.min_tokens}, but there can be no more than {sampling.max_tokens} tokens",
            param="min_tokens",
        )
    forbidden = {word[-1] for word in sampling.bad_words_token_ids}
    if sampling.min_tokens:
        forbidden |= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else limits.eos_token_ids)}
    if sampling.allowed_token_ids is not None and forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: bad_words, or min_tokens with what ends an answer, may forbid every one of them",
            param="allowed_token_ids",
        )
    if len(forbidden) >= limits.vocab_size:
        raise InvalidRequest("bad_words: may forbid every token of this model", param="bad_words")


def check_report_size(prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, times: int) -> None:
    """Raises InvalidRequest for more logprobs of prompts than an answer should hold; ``times`` is how often it tells
    those of each prompt."""
    if sampling.prompt_logprobs is None:
        return
    entries = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs) * times
    if entries > _MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs: {entries} of them are asked for in all (tokens of the prompts by logprobs at each, "
            f"by answers that tell them); "
            f"at most {_MAX_PROMPT_ENTRIES} are given",
            param="prompt_logprobs",
        )


def checked_prompt(prompt: list[int], request: GenerationRequest, asked: int | None, limits: ModelLimits) -> list[int]:
    """The prompt as it will run, truncated if the request says so; ``asked`` tokens are to follow. Raises
    InvalidRequest."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: it has no token", param="prompt")
    beyond = next((token_id for token_id in prompt if token_id >= limits.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"prompt: {beyond} is not a token of this model, whose ids end at {limits.vocab_size - 1}", param="prompt"
        )
    kept = request.truncate_prompt_tokens
    if kept == -1:
        kept = max(1, limits.max_model_len - max(1, asked or 1))
    return prompt if kept is None else prompt[-kept:]


def token_limit(
    prompts: Sequence[Sequence[int]], asked: int | None, otherwise: int | None, limits: ModelLimits, *, param: str
) -> list[int]:
    """For each prompt how many tokens may follow it. Raises InvalidRequest with the numbers.

    ``asked`` is what the client set; ``otherwise`` holds where it set nothing, as far as the model's length goes.
    ``param`` is the field that the prompts came in.
    """
    allowed = []
    for prompt in prompts:
        room = limits.max_model_len - len(prompt)
        if room < 1 or (asked is not None and asked > room):
            wanted = f" and {asked} more were asked for" if asked is not None else ""
            raise InvalidRequest(
                f"this model's context is {limits.max_model_len} tokens; the prompt has {len(prompt)}{wanted}",
                param=param if room < 1 or asked is None else "max_tokens",
                code="context_length_exceeded",
            )
        allowed.append(asked if asked is not None else min(room, otherwise or room))
    return allowed
