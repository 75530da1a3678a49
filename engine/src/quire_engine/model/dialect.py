"""The differences between architectures in config.json: which layers have a sliding window, and default values.

Like ``config``, this module needs no torch. An architecture that is not listed is read like Llama.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire_engine.config_overrides import FULL, SLIDING, is_by_kind
from quire_engine.model.config_fields import Fields
from quire_engine.model.experts import ExpertsConfig
from quire_engine.model.rope import RopeConfig, parse_rope
from quire_engine.model.shape import Windows


def one_rope(
    raw: dict[str, Any], windows: Windows, problems: list[str], default_theta: float = 10_000.0
) -> tuple[RopeConfig, ...]:
    return (parse_rope(raw, problems, default_theta),) * len(windows)


def local_and_global_rope(raw: dict[str, Any], windows: Windows, problems: list[str]) -> tuple[RopeConfig, ...]:
    """Return one rotation for layers with a window and one for the others.

    They come from ``rope_parameters`` by kind of layer (transformers 5), or from ``rope_local_base_freq`` and
    ``rope_theta`` (before).
    """
    by_kind, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    full = dict(raw)
    local = {
        "max_position_embeddings": raw.get("max_position_embeddings"),
        "rope_theta": raw.get("rope_local_base_freq"),
    }
    if isinstance(by_kind, dict) and is_by_kind(by_kind):
        full["rope_parameters"] = by_kind.get(FULL)
        local["rope_parameters"] = by_kind.get(SLIDING)
        if isinstance(scaling, dict):
            full["rope_scaling"] = {**(by_kind.get(FULL) or {}), **scaling}
    everywhere = parse_rope(full, problems, default_theta=1e6)
    within = parse_rope(local, problems)
    return tuple(everywhere if window is None else within for window in windows)


def no_window(fields: Fields, layers: int) -> Windows:
    return (None,) * layers


def one_window(fields: Fields, layers: int) -> Windows:
    """Return a window for every layer if ``sliding_window`` is present."""
    given = fields.raw.get("sliding_window") is not None
    return (fields.positive_int("sliding_window") if given else None,) * layers


def one_window_unless_null(fields: Fields, layers: int) -> Windows:
    """Return a window for every layer, which only a ``sliding_window`` of null removes: absent means the default."""
    return one_window(replace(fields, raw={"sliding_window": 4096, **fields.raw}), layers)


def window_if_used(fields: Fields, layers: int) -> Windows:
    """Return windows if ``use_sliding_window`` is set.

    They are for ``layer_types``, or for layers from ``max_window_layers`` on.
    """
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * layers
    window = fields.positive_int("sliding_window", default=4096)
    full = fields.natural_int("max_window_layers", default=28)
    kinds = fields.layer_types(layers) or ("full_attention",) * full + ("sliding_attention",) * max(0, layers - full)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def same_window_if_used(fields: Fields, layers: int) -> Windows:
    """Return the same window for every layer if ``use_sliding_window`` is set."""
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * layers
    return (fields.positive_int("sliding_window", default=4096),) * layers


def every_other_window(fields: Fields, layers: int) -> Windows:
    """Return a window for the layers in ``layer_types``, else for the first, the third and so on."""
    return _patterned(fields, layers, period=2)


def all_but_every_nth_window(fields: Fields, layers: int) -> Windows:
    """Return a window for the layers in ``layer_types``, else for all but every ``sliding_window_pattern``-th layer."""
    return _patterned(fields, layers, period=fields.positive_int("sliding_window_pattern", default=6))


def _patterned(fields: Fields, layers: int, period: int) -> Windows:
    window = fields.positive_int("sliding_window", default=4096)
    kinds = fields.layer_types(layers)
    is_full = [kind == "full_attention" for kind in kinds] or [(layer + 1) % period == 0 for layer in range(layers)]
    return tuple(None if full else window for full in is_full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    windows: Callable[[Fields, int], Windows] = no_window
    head_dim: int | None = None
    """The default; None means hidden size / heads."""
    partial_rotary: bool = False
    """If set, ``partial_rotary_factor`` is used."""
    tie_word_embeddings: bool = False
    """The default."""
    rms_norm_eps: float = 1e-6
    """The default."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The name of the config field, and the family's activation."""
    query_scalar: int | None = None
    """The default of ``query_pre_attn_scalar``, by whose root attention scores are divided; None: the head dim."""
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    """The defaults of ``attn_logit_softcapping`` and ``final_logit_softcapping``; None means no cap."""
    caps_attention: bool = False
    """If set, ``attn_logit_softcapping`` is used."""
    caps_logits: bool = False
    """If set, ``final_logit_softcapping`` is used."""
    parse_ropes: Callable[[dict[str, Any], Windows, list[str]], tuple[RopeConfig, ...]] = one_rope
    parse_experts: Callable[[Fields, int], ExpertsConfig | None] = lambda fields, layers: None
