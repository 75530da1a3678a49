"""The layers of a model that attend to a sliding window only, read from its config.json.

The engine's ``model/dialect`` reads the same fields; tests/contract compares both.
"""

from collections.abc import Callable, Mapping

from quire_operator.domain.resource.fields import Fields

Windows = tuple[int | None, ...]
"""Tokens per layer; None is full attention."""

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_DEFAULT_PATTERN = 6


def read_windows(family: str, fields: Fields, layers: int) -> Windows:
    """Return the window of each layer. Families without a known rule have full attention in all layers."""
    reader = _READERS.get(family)
    return (None,) * layers if reader is None else reader(fields, layers)


def _one_window(fields: Fields, layers: int) -> Windows:
    return (fields.integer("sliding_window", default=None, minimum=1),) * layers


def _if_used(fields: Fields, layers: int) -> Windows:
    if fields.raw("use_sliding_window") is not True:
        return (None,) * layers
    window = fields.integer("sliding_window", default=_DEFAULT_WINDOW, minimum=1)
    first = fields.integer("max_window_layers", default=_DEFAULT_FULL_LAYERS)
    kinds = _kinds(fields, layers) or [layer < first for layer in range(layers)]
    return tuple(None if is_full else window for is_full in kinds)


def _everywhere_if_used(fields: Fields, layers: int) -> Windows:
    if fields.raw("use_sliding_window") is not True:
        return (None,) * layers
    return (fields.integer("sliding_window", default=_DEFAULT_WINDOW, minimum=1),) * layers


def _every_other(fields: Fields, layers: int) -> Windows:
    return _patterned(fields, layers, period=2)


def _all_but_every_nth(fields: Fields, layers: int) -> Windows:
    period = fields.integer("sliding_window_pattern", default=_DEFAULT_PATTERN, minimum=1)
    return _patterned(fields, layers, period=period)


def _patterned(fields: Fields, layers: int, *, period: int) -> Windows:
    window = fields.integer("sliding_window", default=_DEFAULT_WINDOW, minimum=1)
    kinds = _kinds(fields, layers) or [(layer + 1) % period == 0 for layer in range(layers)]
    return tuple(None if is_full else window for is_full in kinds)


def _kinds(fields: Fields, layers: int) -> list[bool]:
    """Return True for each layer with full attention; empty if ``layer_types`` does not list all layers."""
    kinds = fields.raw("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return []
    return [kind == "full_attention" for kind in kinds]


_READERS: Mapping[str, Callable[[Fields, int], Windows]] = {
    "Gemma2ForCausalLM": _every_other,
    "Gemma3ForCausalLM": _all_but_every_nth,
    "MistralForCausalLM": _one_window,
    "MixtralForCausalLM": _one_window,
    "Phi3ForCausalLM": _one_window,
    "Qwen2ForCausalLM": _if_used,
    "Qwen3ForCausalLM": _if_used,
    "Qwen3MoeForCausalLM": _everywhere_if_used,
}
