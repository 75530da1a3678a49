"""From a validated request to the engine's sampling parameters: the client's values, else the model's defaults.

These are pure functions; ``limits`` checks whether the model accepts the result.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire_engine.core.sampling_params import FIELD_NAMES, SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.server.generation.choice import StopRules
from quire_engine.server.openai.limits import ModelLimits
from quire_engine.server.openai.schemas import GenerationRequest
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import Tokenizer

_GREEDY_BELOW = 1e-4
"""Below this temperature, logits would overflow float16; the likeliest token has all the probability far above it."""
_SEED_MASK = 2**63 - 1
_MAX_WORD_TOKENS = 64
"""The longest bad word, in tokens: the sampler keeps that many of the last tokens of each sequence."""


def stop_rules(request: GenerationRequest, shown_ids: frozenset[int] = frozenset()) -> StopRules:
    """Return the rules by which an answer to this request becomes text and ends; ``shown_ids`` are never skipped."""
    return StopRules(
        strings=tuple(request.stop or ()),
        at_once=request.max_tokens == 0,
        include=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
        shown_ids=shown_ids,
    )


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: Sequence[Sequence[int]],
    grammar: str | None = None,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """Return the parameters of the first of n answers.

    A field that the request and SamplingParams have under one name is copied; only what needs a conversion is named.
    """
    given = {name: value for name in FIELD_NAMES if (value := getattr(request, name, None)) is not None}
    values: dict[str, Any] = {**defaults.params, **given}
    if (temperature := values.get("temperature")) is not None and temperature < _GREEDY_BELOW:
        values["temperature"] = 0.0
    if values.get("top_k", 0) < 1:
        values["top_k"] = None
    if request.seed is not None:
        values["seed"] = request.seed & _SEED_MASK
    values |= {
        "max_tokens": max_tokens,
        "logit_bias": tuple((request.logit_bias or {}).items()),
        "allowed_token_ids": None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        "bad_words_token_ids": tuple(tuple(word) for word in bad_words),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "grammar": grammar,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return SamplingParams(**values)


def of_nth(sampling: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of answer ``number`` of n answers to one prompt.

    The first answer has the request's seed and reports the prompt for all of them. The seeds of the others are derived
    by a hash, so that they do not equal the seeds of other requests.
    """
    if number == 0:
        return sampling
    seed = None if sampling.seed is None else _derived_seed(sampling.seed, number)
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _derived_seed(seed: int, number: int) -> int:
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def bad_words_of(request: GenerationRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[list[int]]:
    """Return the token sequences of the request's bad words, without and with a space before. Raises InvalidRequest."""
    sequences: list[list[int]] = []
    for word in request.bad_words or ():
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False) if text.strip() else []
            if not ids or max(ids) >= limits.vocab_size:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens of this model", param="bad_words")
            if len(ids) > _MAX_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words: {word!r} has {len(ids)} tokens; at most {_MAX_WORD_TOKENS} are accepted",
                    param="bad_words",
                )
            if ids not in sequences:
                sequences.append(ids)
    return sequences
