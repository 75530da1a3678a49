"""The ``adapter_config.json`` of PEFT: what an adapter asks for, and why some cannot be served. Needs no torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.errors import AdapterError

CONFIG = "adapter_config.json"
_INITIALISED = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the weights of the base model as well."""
_UNSUPPORTED = {
    "use_dora": "it is a DoRA adapter, which also rescales the base weights; train it with use_dora=False",
    "modules_to_save": "it replaces whole modules of the base model ({value}); train it without modules_to_save",
    "fan_in_fan_out": "it is for transposed layers (fan_in_fan_out), which no supported model has",
    "lora_bias": "it adds biases (lora_bias); train it with lora_bias=False",
    "layer_replication": "it repeats layers of the base model (layer_replication)",
    "trainable_token_indices": "it changes embeddings (trainable_token_indices); train it without them",
    "target_parameters": "it targets parameters of experts ({value}); only linear layers can have adapters",
    "alora_invocation_tokens": "it is an activated LoRA, which starts in the middle of a prompt",
    "use_qalora": "it is a QA-LoRA adapter; train it with use_qalora=False",
}
_PATTERN_CHARACTERS = 256
_MOST_QUANTIFIERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    rank: int
    alpha: float
    rank_patterns: Mapping[str, int]
    """The rank of modules whose name ends with a pattern."""
    alpha_patterns: Mapping[str, float]
    by_root: bool
    """True divides alpha by the root of the rank (rsLoRA), else by the rank."""
    base: str | None
    """The name of the base model, for messages."""

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_patterns, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_patterns, module, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of the module's name, as PEFT does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def invalid(message: str) -> AdapterError:
    return AdapterError(AdapterFailure.INVALID, message)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the configuration of an adapter. Raise AdapterError if it is damaged or asks for what is unsupported."""
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise invalid(f"{folder} has no {CONFIG}: it is not an adapter in PEFT's layout") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise invalid(f"{file} contains {type(raw).__name__} instead of a JSON object")
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise invalid(f"{CONFIG}: peft_type is {kind!r}; only LORA is supported")
    for field, reason in _UNSUPPORTED.items():
        if value := raw.get(field):
            raise invalid(f"{CONFIG}: {reason.format(value=value)}")
    if raw.get("bias") not in (None, "none"):
        raise invalid(f"{CONFIG}: it changes biases (bias {raw['bias']!r}); train it with bias='none'")
    made = raw.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(_INITIALISED):
        raise invalid(
            f"{CONFIG}: init_lora_weights {made!r} changes the base weights as well; convert the adapter to plain LoRA"
            " when it is saved (PEFT: path_initial_model_for_weight_conversion)"
        )
    base = raw.get("base_model_name_or_path")
    return AdapterConfig(
        rank=_rank(raw.get("r"), "r"),
        alpha=_alpha(raw.get("lora_alpha"), "lora_alpha"),
        rank_patterns={name: _rank(value, where) for name, value, where in _patterns(raw, "rank_pattern")},
        alpha_patterns={name: _alpha(value, where) for name, value, where in _patterns(raw, "alpha_pattern")},
        by_root=raw.get("use_rslora") is True,
        base=base if isinstance(base, str) and base else None,
    )


def _rank(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(f"{CONFIG}: {where} is {value!r}; a whole number of at least 1 is needed")
    return value


def _alpha(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise invalid(f"{CONFIG}: {where} is {value!r}; a number is needed")
    return float(value)


def _patterns(raw: Mapping[str, Any], field: str) -> list[tuple[str, object, str]]:
    found = raw.get(field) or {}
    if not isinstance(found, dict):
        raise invalid(f"{CONFIG}: {field} is {type(found).__name__}; an object of patterns is needed")
    for pattern in found:
        _check_pattern(pattern, field)
    return [(pattern, value, f"{field}[{pattern!r}]") for pattern, value in found.items()]


def _check_pattern(pattern: str, field: str) -> None:
    """Raise AdapterError for a pattern that is no regular expression, or that could take very long to match."""
    quantifiers = re.findall(r"[*+{]", pattern)
    if len(pattern) > _PATTERN_CHARACTERS or len(quantifiers) > _MOST_QUANTIFIERS or re.search(r"\)[*+?{]", pattern):
        raise invalid(f"{CONFIG}: the pattern {pattern[:80]!r} of {field} is too complex; name the modules instead")
    try:
        re.compile(pattern)
    except re.error as error:
        raise invalid(f"{CONFIG}: the pattern {pattern!r} of {field} is not a regular expression: {error}") from error
