"""How an architecture's config.json is read where architectures differ: which layers have a sliding window, defaults.

Needs no torch, as ``config`` does not. An architecture that is not listed reads as Llama's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.model.config_fields import Fields

Windows = tuple[int | None, ...]
"""By layer, the tokens a query may look back on, itself included; None is all of them."""


def no_window(fields: Fields, layers: int) -> Windows:
    return (None,) * layers


def one_window(fields: Fields, layers: int) -> Windows:
    """In every layer, where ``sliding_window`` is given."""
    given = fields.raw.get("sliding_window") is not None
    return (fields.positive_int("sliding_window") if given else None,) * layers


def window_if_used(fields: Fields, layers: int) -> Windows:
    """Where ``use_sliding_window`` is set: in those ``layer_types`` lists, or from ``max_window_layers`` on."""
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * layers
    window = fields.positive_int("sliding_window", default=4096)
    full = fields.natural_int("max_window_layers", default=28)
    kinds = fields.layer_types(layers) or ("full_attention",) * full + ("sliding_attention",) * max(0, layers - full)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    windows: Callable[[Fields, int], Windows] = no_window
    head_dim: int | None = None
    """Where the config gives none; None is hidden size / heads."""
    partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` is heeded."""


_DIALECTS = {
    "MistralForCausalLM": Dialect(windows=one_window),
    "Phi3ForCausalLM": Dialect(windows=one_window, partial_rotary=True),
    "Qwen2ForCausalLM": Dialect(windows=window_if_used),
    "Qwen3ForCausalLM": Dialect(windows=window_if_used, head_dim=128),
}


def find_dialect(architecture: str) -> Dialect:
    return _DIALECTS.get(architecture, Dialect())
