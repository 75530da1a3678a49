"""The layers of a model that attend to a sliding window or a chunk only, read from its config.json.

The engine's ``model/dialect``, or transformers, reads the same fields; tests/contract compares both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from quire_operator.domain.resource.fields import Fields

Windows = tuple[int | None, ...]
"""Tokens per layer; None is full attention."""

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_DEFAULT_PATTERN = 6
_DEFAULT_CHUNK = 8192


def read_windows(family: str, fields: Fields, layers: int) -> Windows:
    """Return the window of each layer. Families without a known rule have full attention in all layers."""
    reader = _READERS.get(family)
    return (None,) * layers if reader is None else reader(fields, layers)


def _one_window(fields: Fields, layers: int) -> Windows:
    return (fields.integer("sliding_window", default=None, minimum=1),) * layers


def _one_window_unless_null(fields: Fields, layers: int) -> Windows:
    default = None if fields.raw("sliding_window", default=_DEFAULT_WINDOW) is None else _DEFAULT_WINDOW
    return (fields.integer("sliding_window", default=default, minimum=1),) * layers


def _if_used(fields: Fields, layers: int) -> Windows:
    if fields.raw("use_sliding_window") is not True:
        return (None,) * layers
    first = fields.integer("max_window_layers", default=_DEFAULT_FULL_LAYERS)
    return _windows(fields, _kinds(fields, layers) or [layer < first for layer in range(layers)])


def _everywhere_if_used(fields: Fields, layers: int) -> Windows:
    is_used = fields.raw("use_sliding_window") is True
    return _windows(fields, [False] * layers) if is_used else (None,) * layers


def _patterned(fields: Fields, layers: int, *, period: int, default: int = _DEFAULT_WINDOW) -> Windows:
    """Return full attention in every layer whose number is a multiple of ``period``."""
    return _windows(fields, _kinds(fields, layers) or _every(period, layers), default=default)


def _all_but_every_nth(fields: Fields, layers: int) -> Windows:
    period = fields.integer("sliding_window_pattern", default=_DEFAULT_PATTERN, minimum=1)
    return _patterned(fields, layers, period=period)


def _all_but_every_sixth_and_the_last(fields: Fields, layers: int) -> Windows:
    return (*_patterned(fields, layers, period=_DEFAULT_PATTERN, default=512)[:-1], None)


def _chunks(fields: Fields, layers: int) -> Windows:
    """Return Llama 4's: chunks, but in every fourth layer, or in those without rotation."""
    period = fields.integer("no_rope_layer_interval", default=4, minimum=1)
    rotated = fields.raw("no_rope_layers")
    kinds = _kinds(fields, layers)
    if not kinds and isinstance(rotated, list) and len(rotated) == layers:
        kinds = [not is_rotated for is_rotated in rotated]
    return _windows(fields, kinds or _every(period, layers), key="attention_chunk_size", default=_DEFAULT_CHUNK)


def _windows(
    fields: Fields, are_full: Sequence[bool], *, key: str = "sliding_window", default: int = _DEFAULT_WINDOW
) -> Windows:
    window = fields.integer(key, default=default, minimum=1)
    return tuple(None if is_full else window for is_full in are_full)


def _every(period: int, layers: int) -> list[bool]:
    return [(layer + 1) % period == 0 for layer in range(layers)]


def _kinds(fields: Fields, layers: int) -> list[bool]:
    """Return True for each layer with full attention; empty if ``layer_types`` does not list all layers."""
    kinds = fields.raw("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return []
    return [kind == "full_attention" for kind in kinds]


_READERS: Mapping[str, Callable[[Fields, int], Windows]] = {
    "Gemma2ForCausalLM": partial(_patterned, period=2),
    "Gemma3ForCausalLM": _all_but_every_nth,
    "Gemma4ForCausalLM": _all_but_every_sixth_and_the_last,
    "Gemma4ForConditionalGeneration": _all_but_every_sixth_and_the_last,
    "GptOssForCausalLM": partial(_patterned, period=2, default=128),
    "Llama4ForCausalLM": _chunks,
    "MistralForCausalLM": _one_window_unless_null,
    "MixtralForCausalLM": _one_window,
    "Phi3ForCausalLM": _one_window,
    "Qwen2ForCausalLM": _if_used,
    "Qwen3ForCausalLM": _if_used,
    "Qwen3MoeForCausalLM": _everywhere_if_used,
}
