"""The options of speculative decoding, from vLLM's ``--speculative-config`` or from plain flags."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quire_common.flags.table import FlagValues
from quire_engine.config import SpeculationMethod, SpeculationOptions

NGRAM: Final = "ngram"
DRAFT_MODEL: Final = "draft_model"
REMOVED_METHODS: Final = {"eagle": "use draft_model with a smaller model that has the same tokenizer, or ngram"}
_METHODS: tuple[SpeculationMethod, ...] = (NGRAM, DRAFT_MODEL)
_DEFAULTS = SpeculationOptions()
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "required")
_PLAIN = ("spec-method", "spec-model", "spec-tokens", "spec-required")
MOST_TOKENS = 127
"""The largest number of drafts with the largest block size."""


def speculation_problems(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with the flags of speculation."""
    config = values["speculative-config"]
    if config is not None:
        for name in _PLAIN:
            if values.is_set(name):
                yield f"--{name} and --speculative-config contradict each other: remove one of them"
        yield from _config_problems(config)
    else:
        yield from _plain_problems(values)
    block_size = values["block-size"]
    options = speculation_options(values)
    if options is not None and block_size is not None and options.max_tokens >= block_size:
        name = "--spec-tokens" if config is None else "--speculative-config num_speculative_tokens"
        yield (
            f"{name} {options.max_tokens}: the drafts of a step must be fewer than the {block_size} tokens of a block,"
            f" so at most {block_size - 1}; lower it, or raise --block-size"
        )


def _plain_problems(values: FlagValues) -> Iterator[str]:
    method, model = values["spec-method"], values["spec-model"]
    if method == DRAFT_MODEL and model is None:
        yield "--spec-method draft_model needs --spec-model: the folder of the draft model, or org/name on a hub"
    if model is not None and method in (NGRAM, "none") and values.is_set("spec-method"):
        yield f"--spec-model needs --spec-method draft_model, and it is {method}: remove one of them"
    if values.is_set("spec-tokens") and model is None and method in (None, "none"):
        yield "--spec-tokens needs a method: add --spec-method ngram, or --spec-model"


def _method_of(config: Mapping[str, Any]) -> str | None:
    """Return the method, which vLLM lets follow from the model's name."""
    method, model = config.get("method"), config.get("model")
    if method is None and isinstance(model, str):
        return NGRAM if model.strip("[]") == NGRAM else DRAFT_MODEL
    return None if method is None else str(method)


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for key in config:
        if key not in _KEYS:
            yield f"--speculative-config {key}: is not known here; the keys are {', '.join(_KEYS)}"
    method, model = _method_of(config), config.get("model")
    if method in REMOVED_METHODS:
        yield f"--speculative-config method: {method} was removed: {REMOVED_METHODS[method]}"
    elif method not in _METHODS:
        found = "missing" if method is None else method
        yield (f'--speculative-config method: {found}; the methods are "{NGRAM}" (prompt lookup) and "{DRAFT_MODEL}"')
    elif method == DRAFT_MODEL and not (isinstance(model, str) and model.strip()):
        yield "--speculative-config model: is missing; name the folder of the draft model, or org/name on a hub"
    if not isinstance(config.get("required"), bool | None):
        yield f"--speculative-config required: {config['required']!r} is neither true nor false"
    for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"--speculative-config {key}: {value!r} is not a whole number of at least 1"
    lowest, highest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if isinstance(lowest, int) and isinstance(highest, int) and lowest > highest:
        yield f"--speculative-config prompt_lookup_min: {lowest} is more than prompt_lookup_max {highest}"


def speculation_options(values: FlagValues) -> SpeculationOptions | None:
    """Return the options; None without speculation, or if ``speculation_problems`` finds the config unusable."""
    config = values["speculative-config"]
    if config is None:
        method, model = values["spec-method"], values["spec-model"]
        if method in (None, "none") and model is None:
            return None
        return SpeculationOptions(
            method=DRAFT_MODEL if model is not None else NGRAM,
            model=model,
            required=values["spec-required"] is not False,
            max_tokens=values["spec-tokens"] or _DEFAULTS.max_tokens,
        )
    if any(_config_problems(config)):
        return None
    lowest, highest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    method = next(known for known in _METHODS if known == _method_of(config))
    # As in vLLM, one of the two lengths of a match alone stands for both.
    return SpeculationOptions(
        method=method,
        model=None if method == NGRAM else Path(config["model"]).expanduser(),
        required=config.get("required") is not False,
        max_tokens=config.get("num_speculative_tokens") or _DEFAULTS.max_tokens,
        shortest_match=lowest or highest or _DEFAULTS.shortest_match,
        longest_match=highest or lowest or _DEFAULTS.longest_match,
    )
