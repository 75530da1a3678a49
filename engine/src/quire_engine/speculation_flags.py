"""The options of speculative decoding, from vLLM's ``--speculative-config`` or from plain flags."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire_common.flags.table import FlagValues
from quire_engine.config import SpeculationOptions

NGRAM = "ngram"
_DEFAULTS = SpeculationOptions()
_METHOD_NAMES = ("model", "method")
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_PLAIN = ("spec-method", "spec-tokens")
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
    elif values.is_set("spec-tokens") and values["spec-method"] in (None, "none"):
        yield "--spec-tokens needs a method: add --spec-method ngram"
    block_size = values["block-size"]
    options = speculation_options(values)
    if options is not None and block_size is not None and options.max_tokens >= block_size:
        name = "--spec-tokens" if config is None else "--speculative-config num_speculative_tokens"
        yield (
            f"{name} {options.max_tokens}: the drafts of a step must be fewer than the {block_size} tokens of a block,"
            f" so at most {block_size - 1}; lower it, or raise --block-size"
        )


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for key in config:
        if key not in _KEYS:
            yield f"--speculative-config {key}: is not known here; the keys are {', '.join(_KEYS)}"
    methods = {str(config[name]).strip("[]") for name in _METHOD_NAMES if config.get(name) is not None}
    if methods != {NGRAM}:
        found = " and ".join(sorted(methods)) or "missing"
        yield f'--speculative-config method: {found}; the only method is "{NGRAM}" (prompt lookup)'
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
        if values["spec-method"] in (None, "none"):
            return None
        return SpeculationOptions(max_tokens=values["spec-tokens"] or _DEFAULTS.max_tokens)
    if any(_config_problems(config)):
        return None
    lowest, highest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    # As in vLLM, one of the two alone stands for both.
    return SpeculationOptions(
        max_tokens=config.get("num_speculative_tokens") or _DEFAULTS.max_tokens,
        shortest_match=lowest or highest or _DEFAULTS.shortest_match,
        longest_match=highest or lowest or _DEFAULTS.longest_match,
    )
