"""From a validated request to the engine's sampling parameters: what the client says, else the model's defaults.

Pure. What is wrong with the request in the light of the model (its vocabulary, its length) is found here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from quire_engine.errors import InvalidRequest
from quire_engine.ipc.messages import Sampling
from quire_engine.server.choice import StopRules
from quire_engine.server.openai.schemas import GenerationRequest
from quire_engine.text.generation_config import SamplingDefaults

T = TypeVar("T")

_GREEDY_BELOW = 1e-4
"""A temperature so small divides logits beyond float16; the likeliest token has all the probability long before."""
_SEED_MASK = 2**63 - 1
_CHARACTERS_PER_TOKEN = 256
"""More than any text has on average: the longest tokens there are stand for some hundred spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request must keep to."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    priorities: bool
    """Whether requests have priorities here."""


def stop_rules(request: GenerationRequest) -> StopRules:
    return StopRules(
        strings=tuple(request.stop or ()),
        include=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
    )


def sampling_of(
    request: GenerationRequest, *, max_tokens: int, logprobs: int | None, defaults: SamplingDefaults
) -> Sampling:
    """The parameters of the first of n."""
    temperature = _first(request.temperature, defaults.temperature)
    top_k = _first(request.top_k, defaults.top_k or 0)
    return Sampling(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=_first(request.top_p, defaults.top_p),
        top_k=top_k if top_k > 0 else None,
        min_p=_first(request.min_p, defaults.min_p),
        seed=None if request.seed is None else request.seed & _SEED_MASK,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((request.logit_bias or {}).items()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
    )


def of_nth(sampling: Sampling, number: int) -> Sampling:
    """With a seed, each of n draws from its own: the seed itself, the next, and so on."""
    if sampling.seed is None or number == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) & _SEED_MASK)


def _first(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def check_against_model(request: GenerationRequest, logprobs: int | None, limits: ModelLimits) -> None:
    """Raises InvalidRequest."""
    for name, ids in (("logit_bias", request.logit_bias or {}), ("stop_token_ids", request.stop_token_ids or [])):
        beyond = next((token_id for token_id in ids if token_id >= limits.vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(
                f"{name}: {beyond} is not a token of this model, whose ids end at {limits.vocab_size - 1}", param=name
            )
    if logprobs is not None and logprobs > limits.max_logprobs:
        raise InvalidRequest(
            f"logprobs: {logprobs} are asked for, at most {limits.max_logprobs} are given (--max-logprobs)",
            param="logprobs",
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


def checked_prompt(prompt: list[int], request: GenerationRequest, limits: ModelLimits) -> list[int]:
    """The prompt as it will run, truncated if the request says so. Raises InvalidRequest."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: it has no token", param="prompt")
    beyond = next((token_id for token_id in prompt if token_id >= limits.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"prompt: {beyond} is not a token of this model, whose ids end at {limits.vocab_size - 1}", param="prompt"
        )
    return prompt if request.truncate_prompt_tokens is None else prompt[-request.truncate_prompt_tokens :]


def token_limit(
    prompts: Sequence[Sequence[int]], asked: int | None, otherwise: int | None, limits: ModelLimits
) -> list[int]:
    """For each prompt how many tokens may follow it. Raises InvalidRequest with the numbers.

    ``asked`` is what the client set; ``otherwise`` holds where it set nothing, as far as the model's length goes.
    """
    allowed = []
    for prompt in prompts:
        room = limits.max_model_len - len(prompt)
        if room < 1 or (asked is not None and asked > room):
            wanted = f" and {asked} more were asked for" if asked is not None else ""
            raise InvalidRequest(
                f"this model's context is {limits.max_model_len} tokens; the prompt has {len(prompt)}{wanted}",
                param="messages" if asked is None else "max_tokens",
                code="context_length_exceeded",
            )
        allowed.append(asked if asked is not None else min(room, otherwise or room))
    return allowed
