"""A model folder's configuration as transformers reads it: the class, the number of positions, the end tokens.

It rejects unsupported kinds of models before anything is built: encoder-decoders, layers that keep a state, and custom
code that is not allowed.
"""

import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire_engine.errors import ModelFolderError
from quire_engine.model.config import read_eos_token_ids, warn_of_unread
from quire_engine.model_folder import (
    NO_OVERRIDES,
    ConfigOverrides,
    read_config,
    read_generation_config,
    read_json_object,
)

_STATE = (
    "has recurrent, convolution or state-space layers ({}): they keep a state that is not a KV cache, and tokens packed"
    " into one batch would run into each other's"
)
_OF_EVERY_CONFIG = ("architectures", "auto_map", "dtype", "eos_token_id", "model_type", "torch_dtype")
_STATEFUL_LAYERS = ("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent")
_KNOWN_LAYERS = ("attention", "full_attention", "sliding_attention", "chunked_attention")
_POSITION_LIMITS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")


class Unservable(Exception):
    """A model that cannot run with our cache; ``str(error)`` states the reason, with the model as its subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    """The configuration of the language model, which may be a part of a larger one."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    runs_folder_code: bool


def describe(folder: Path, *, trust_remote_code: bool, overrides: ConfigOverrides = NO_OVERRIDES) -> Description:
    """Return the description. Raise Unservable, or ModelFolderError if the folder or its files cannot be read."""
    raw, generation = read_config(folder, overrides), read_generation_config(folder, overrides)
    custom = _is_custom(raw)
    if custom and not trust_remote_code:
        raise Unservable(
            "is code of the model folder's own (auto_map in config.json), which runs in the engine process only with"
            " --trust-remote-code"
        )
    if not raw:
        raise ModelFolderError(f"{folder} has no config.json; a model is a folder in Hugging Face layout")
    config = _load_config(folder, raw, trust_remote_code=custom)
    if overrides.config:
        config = _read_from(config, raw)
        warn_of_unread(list(_undeclared(config, overrides.config)), f"transformers' {type(config).__name__}")
    model_class = _custom_class(folder, raw) if custom else find_class(config, _architectures(raw))
    return describe_config(model_class, config, generation, runs_folder_code=custom)


def name_of(folder: Path) -> str:
    """Return the name of the folder's model: the architecture, else the type."""
    raw = read_json_object(folder / "config.json")
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else f"the model type {raw.get('model_type')}"


def describe_config(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    generation: dict[str, Any],
    *,
    runs_folder_code: bool = False,
) -> Description:
    """Return the description of a configuration. Raise Unservable if the model is not supported."""
    if config.is_encoder_decoder:
        raise Unservable("is an encoder-decoder; a decoder-only causal language model is needed")
    if getattr(config, "quantization_config", None) is not None:
        raise Unservable("is quantized (quantization_config); weights in 16 or 32 bits are needed")
    if config.sub_configs.get("text_config") is model_class.config_class is not None:
        config = config.get_text_config()
    text = config.get_text_config()
    _check_layers(model_class, text)
    if not model_class._can_set_attn_implementation():
        raise Unservable("computes attention by itself and not through transformers' interface for it")
    _settle_rope(text)
    problems: list[str] = []
    ends = read_eos_token_ids({"eos_token_id": getattr(text, "eos_token_id", None)}, generation, problems)
    if problems:
        raise Unservable(f"has a wrong configuration: {problems[0]}")
    return Description(
        model_class=model_class,
        config=config,
        max_position_embeddings=_longest(text),
        eos_token_ids=ends,
        runs_folder_code=runs_folder_code,
    )


def find_class(config: PreTrainedConfig, architectures: tuple[str, ...]) -> type[PreTrainedModel]:
    """Return transformers' class for the first causal architecture in the list, else for the type."""
    if config.is_encoder_decoder:
        raise Unservable("is an encoder-decoder; a decoder-only causal language model is needed")
    names = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(names)}
    own = _as_tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ()))
    chosen = next((name for name in architectures or own if name in names), None)
    if chosen is None:
        raise Unservable("is not a causal language model of transformers")
    import transformers

    found: type[PreTrainedModel] = getattr(transformers, chosen)
    return found


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _architectures(raw: dict[str, Any]) -> tuple[str, ...]:
    named = raw.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise Unservable(f"has architectures {named!r} in its config.json; a list of names is needed")
    return tuple(named)


def _is_custom(raw: dict[str, Any]) -> bool:
    """Return whether only the folder's own code can run the model: transformers' own code takes precedence."""
    named = _architectures(raw)
    known = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(names)}
    is_known = raw.get("model_type") in CONFIG_MAPPING and (not named or any(name in known for name in named))
    return isinstance(raw.get("auto_map"), dict) and not is_known


def _load_config(folder: Path, raw: dict[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    if not trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
        version = importlib.metadata.version("transformers")
        raise Unservable(f"has a model_type that transformers {version} does not know: {raw.get('model_type')!r}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the exception of a configuration class for unexpected values can be of any type
        raise Unservable(f"has a configuration that cannot be read: {_one_line(error)}") from error
    return config


def _read_from(config: PreTrainedConfig, raw: dict[str, Any]) -> PreTrainedConfig:
    """Return a configuration of the same class with the fields of ``raw``."""
    try:
        changed: PreTrainedConfig = type(config).from_dict(raw)
    except Exception as error:  # the exception of a configuration class for unexpected values can be of any type
        raise Unservable(f"has no configuration with --hf-overrides: {_one_line(error)}") from error
    return changed


def _undeclared(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of overrides that the configuration's class does not declare, and does not read therefore."""
    known = {*inspect.signature(type(config).__init__).parameters, *config.attribute_map, *_OF_EVERY_CONFIG}
    if "rope_parameters" in known:
        known |= {"rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _undeclared(part, value))
        elif name not in known:
            yield name


def _custom_class(folder: Path, raw: dict[str, Any]) -> type[PreTrainedModel]:
    reference = raw["auto_map"].get(AutoModelForCausalLM.__name__)
    if not isinstance(reference, str):
        raise Unservable("names no AutoModelForCausalLM in its auto_map")
    try:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(reference, folder, local_files_only=True)
    except Exception as error:  # the folder's own code
        raise Unservable(f"has code that cannot be loaded: {_one_line(error)}") from error
    return found


def _check_layers(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    found = [kind for kind in _STATEFUL_LAYERS if kind in kinds]
    if found or model_class._is_stateful:
        raise Unservable(_STATE.format(", ".join(found) or config.model_type))
    # A layer that selects a few of many tokens may look like full attention as long as there are few.
    unknown = sorted({str(kind) for kind in kinds} - set(_KNOWN_LAYERS))
    if unknown:
        raise Unservable(f"has layers that our kernel does not compute ({', '.join(unknown)})")


def _settle_rope(config: PreTrainedConfig) -> None:
    """Replace dynamic scaling by the default, which is equal within ``max_position_embeddings`` and reads no values."""
    given = getattr(config, "rope_parameters", None)
    for rope in _ropes(given):
        if rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"


def _ropes(given: Any) -> list[dict[str, Any]]:
    """Return the rotations: one, or one for each kind of layer."""
    if not isinstance(given, dict):
        return []
    return [given] if "rope_type" in given else [rope for rope in given.values() if isinstance(rope, dict)]


def _longest(config: PreTrainedConfig) -> int:
    limits = [getattr(config, name, None) for name in _POSITION_LIMITS]
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if longest is None:
        raise Unservable("does not say how many positions it has (max_position_embeddings)")
    # Beyond its original positions, this scaling changes the angles of all sequences of a batch when one grows longer.
    originals = [
        rope["original_max_position_embeddings"]
        for rope in _ropes(getattr(config, "rope_parameters", None))
        if rope.get("rope_type") == "longrope" and isinstance(rope.get("original_max_position_embeddings"), int)
    ]
    stretched = [
        int(rope["original_max_position_embeddings"] * rope["factor"])
        for rope in _ropes(getattr(config, "rope_parameters", None))
        if rope.get("rope_type") == "yarn"
        and all(isinstance(rope.get(name), int | float) for name in ("original_max_position_embeddings", "factor"))
    ]
    return min([max([longest, *stretched]), *originals])


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
