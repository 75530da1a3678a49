"""The differences between architectures in config.json apart from attention, which ``quire_common.model_memory`` reads.

Like ``config``, this module needs no torch. An architecture that is not listed is read like Llama.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_common.model_memory import FULL, SLIDING, Fields, Windows
from quire_engine.config_overrides import is_by_kind
from quire_engine.model.experts import ExpertsConfig
from quire_engine.model.rope import RopeConfig, parse_rope


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    partial_rotary: bool = False
    """If set, ``partial_rotary_factor`` is used."""
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
