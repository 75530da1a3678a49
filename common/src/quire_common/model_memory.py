"""The sizes of a model that determine its memory, read from its config.json: heads, windows, KV widths, weights.

Pure.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any, Final, Literal

_SHOWN_CHARACTERS = 160
_MAX_INT = 2**31 - 1
"""Authors of configs are unknown: no size may make arithmetic slow."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of ``raw``. The value that a getter returns after a problem only helps to find further problems."""

    raw: Mapping[str, Any]
    problems: list[str]
    prefix: str = ""

    def positive_int(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is int and 0 < value <= (most or _MAX_INT):
            return value
        is_bounded = most is not None or (type(value) is int and value > _MAX_INT)
        right = f"1 to {most or _MAX_INT} is needed" if is_bounded else "a whole number above 0 is needed"
        self._note(name, value, right)
        return 1

    def natural_int(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is int and 0 <= value <= _MAX_INT:
            return value
        self._note(name, value, "a whole number, 0 or more, is needed")
        return 0

    def section(self, name: str) -> "Fields":
        """Return the fields of a nested object, which is empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            self._note(name, value, "an object is needed")
            value = {}
        return Fields(value, self.problems, f"{self.prefix}{name}.")

    def layer_types(self, layers: int, kinds: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
        """Return the kind of attention of each layer; an empty tuple if ``layer_types`` is absent."""
        value = self.raw.get("layer_types")
        if value is None:
            return ()
        if isinstance(value, list) and len(value) == layers and all(kind in kinds for kind in value):
            return tuple(value)
        self._note("layer_types", value, f"a list of {layers} of {', '.join(kinds)} is needed")
        return ()

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if _is_number(value) and value > 0:
            return float(value)
        self._note(name, value, "a number above 0 is needed")
        return 1.0

    def positive_floats(self, name: str) -> tuple[float, ...]:
        value = self.raw.get(name)
        if isinstance(value, list) and all(_is_number(item) and item > 0 for item in value):
            return tuple(float(item) for item in value)
        self._note(name, value, "a list of numbers above 0 is needed")
        return ()

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """Return integers from 0 to ``count`` - 1; an empty tuple if the field is absent."""
        value = self._get(name, [])
        if isinstance(value, list) and all(type(item) is int and 0 <= item < count for item in value):
            return tuple(value)
        self._note(name, value, f"a list of whole numbers from 0 to {count - 1} is needed")
        return ()

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        self._note(name, value, "true or false is needed")
        return default

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self._get(name, default)
        if isinstance(value, str) and value in choices:
            return value
        self._note(name, value, f"supported: {', '.join(choices)}")
        return default

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def _note(self, name: str, value: Any, right: str) -> None:
        shown = repr(value) if len(repr(value)) <= _SHOWN_CHARACTERS else f"{repr(value)[:_SHOWN_CHARACTERS]}…"
        problem = f"{self.prefix}{name} {'is missing' if value is None else f'is {shown}'}; {right}"
        # A field that is read twice, for example for a layer and for its experts, has one problem.
        if problem not in self.problems:
            self.problems.append(problem)


def _is_number(value: Any) -> bool:
    """Return whether the value is a finite number; Python's JSON parser accepts NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


DTypeName = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: Mapping[DTypeName, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
Windows = tuple[int | None, ...]
"""For each layer, the number of tokens that a query sees, including itself; None means all of them."""
MAX_LAYERS = 10_000
"""Far above any model: per-layer data must not fill the memory before the shape is found to be invalid."""
_WINDOW, _CHUNK = 4096, 8192
"""The defaults of ``sliding_window`` and ``attention_chunk_size``."""
_CAUSAL = "ForCausalLM"
_HEADLESS = ("Model", "ForSequenceClassification")
"""The ends of the names of architectures that are a decoder with another head than the LM head, or without one."""
_OF_THE_WHOLE = ("eos_token_id", "quantization_config")
"""The fields next to ``text_config`` that describe the decoder."""
_TIED = "tie_word_embeddings"


def _no_window(fields: Fields, layers: int) -> Windows:
    return (None,) * layers


def _one_window(fields: Fields, layers: int) -> Windows:
    """Return a window for every layer if ``sliding_window`` is present."""
    given = fields.raw.get("sliding_window") is not None
    return (fields.positive_int("sliding_window") if given else None,) * layers


def _one_window_unless_null(fields: Fields, layers: int) -> Windows:
    """Return a window for every layer, which only a ``sliding_window`` of null removes: absent means the default."""
    return _one_window(replace(fields, raw={"sliding_window": _WINDOW, **fields.raw}), layers)


def _window_if_used(fields: Fields, layers: int) -> Windows:
    """Return windows if ``use_sliding_window`` is set.

    They are for ``layer_types``, or for layers from ``max_window_layers`` on.
    """
    if not fields.boolean("use_sliding_window", default=False):
        return (None,) * layers
    first = fields.natural_int("max_window_layers", default=28)
    return _windows(fields, _full_layers(fields, layers) or [layer < first for layer in range(layers)])


def _same_window_if_used(fields: Fields, layers: int) -> Windows:
    """Return the same window for every layer if ``use_sliding_window`` is set."""
    is_used = fields.boolean("use_sliding_window", default=False)
    return _windows(fields, [False] * layers) if is_used else (None,) * layers


def _patterned(fields: Fields, layers: int, *, period: int, default: int = _WINDOW) -> Windows:
    """Return a window for the layers in ``layer_types``, else for all but every ``period``-th layer."""
    return _windows(fields, _full_layers(fields, layers) or _every(period, layers), default=default)


def _all_but_every_nth(fields: Fields, layers: int) -> Windows:
    """Return a window for the layers in ``layer_types``, else for all but every ``sliding_window_pattern``-th layer."""
    return _patterned(fields, layers, period=fields.positive_int("sliding_window_pattern", default=6))


def _all_but_every_sixth_and_the_last(fields: Fields, layers: int) -> Windows:
    return (*_patterned(fields, layers, period=6, default=512)[:-1], None)


def _chunks(fields: Fields, layers: int) -> Windows:
    """Return Llama 4's chunks, which every fourth layer, or each layer without rotation, does not have."""
    period = fields.positive_int("no_rope_layer_interval", default=4)
    rotated = fields.raw.get("no_rope_layers")
    are_full = _full_layers(fields, layers, (FULL, "chunked_attention"))
    if not are_full and isinstance(rotated, list) and len(rotated) == layers:
        are_full = [not is_rotated for is_rotated in rotated]
    return _windows(fields, are_full or _every(period, layers), key="attention_chunk_size", default=_CHUNK)


def _windows(
    fields: Fields, are_full: Sequence[bool], *, key: str = "sliding_window", default: int = _WINDOW
) -> Windows:
    window = fields.positive_int(key, default=default)
    return tuple(None if is_full else window for is_full in are_full)


def _every(period: int, layers: int) -> list[bool]:
    return [(layer + 1) % period == 0 for layer in range(layers)]


def _full_layers(fields: Fields, layers: int, kinds: Sequence[str] = (FULL, SLIDING)) -> list[bool]:
    """Return for each layer whether its attention is full; an empty list if ``layer_types`` is absent."""
    return [kind == FULL for kind in fields.layer_types(layers, kinds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDefaults:
    """The meaning of the fields that a family's config.json may omit, and which layers have a window."""

    windows: Callable[[Fields, int], Windows] = _no_window
    head_dim: int | None = None
    """None means hidden size / heads."""
    tie_word_embeddings: bool = False
    text_part_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The values that checkpoints of a larger model leave out of ``text_config``, by its architecture."""


_GEMMA_4 = FamilyDefaults(windows=_all_but_every_sixth_and_the_last, head_dim=256, tie_word_embeddings=True)
_GEMMA_3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
FAMILY_DEFAULTS: Final[Mapping[str, FamilyDefaults]] = {
    "Gemma2ForCausalLM": FamilyDefaults(windows=partial(_patterned, period=2), head_dim=256, tie_word_embeddings=True),
    "Gemma3ForCausalLM": FamilyDefaults(
        windows=_all_but_every_nth,
        head_dim=256,
        tie_word_embeddings=True,
        text_part_of={"Gemma3ForConditionalGeneration": _GEMMA_3_TEXT},
    ),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    "GptOssForCausalLM": FamilyDefaults(windows=partial(_patterned, period=2, default=128), head_dim=64),
    "Llama4ForCausalLM": FamilyDefaults(windows=_chunks, head_dim=128),
    "MistralForCausalLM": FamilyDefaults(
        windows=_one_window_unless_null,
        text_part_of={"Mistral3ForConditionalGeneration": {"tie_word_embeddings": True}},
    ),
    "MixtralForCausalLM": FamilyDefaults(windows=_one_window),
    "Phi3ForCausalLM": FamilyDefaults(windows=_one_window),
    "Qwen2ForCausalLM": FamilyDefaults(
        windows=_window_if_used,
        text_part_of=dict.fromkeys(
            ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
            {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        ),
    ),
    "Qwen3ForCausalLM": FamilyDefaults(
        windows=_window_if_used,
        head_dim=128,
        text_part_of={"Qwen3VLForConditionalGeneration": {"rope_theta": 5e5}},
    ),
    "Qwen3MoeForCausalLM": FamilyDefaults(windows=_same_window_if_used),
}
"""The families that differ from Llama. An architecture that is not listed is read like Llama."""
_LLAMA = FamilyDefaults()
_TEXT_PARTS = {
    whole: (name, omitted) for name, family in FAMILY_DEFAULTS.items() for whole, omitted in family.text_part_of.items()
}
"""The decoder's architecture and the values that its checkpoints leave out, by the larger model's architecture."""


def text_part(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the decoder in a larger model; None if ``raw`` is not such a model."""
    part = next((_TEXT_PARTS[name] for name in _architectures(raw) if name in _TEXT_PARTS), None)
    if part is None:
        return None
    family, omitted = part
    stated = raw.get("text_config")
    # Qwen's first checkpoints have the decoder's fields at the top level.
    own = (
        stated if isinstance(stated, dict) else {name: value for name, value in raw.items() if name != "vision_config"}
    )
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    given = {name: value for name, value in own.items() if value is not None or name not in omitted}
    # transformers 4 writes the flag into text_config, 5 next to it, and each writes its default into the other place.
    flags = [raw.get(_TIED) if raw.get(_TIED) is not None else omitted.get(_TIED), own.get(_TIED)]
    tied = True if True in flags else next((flag for flag in flags if flag is not None), None)
    return {**omitted, **given, **whole, _TIED: tied, "architectures": [family]}


def causal_architecture(raw: Mapping[str, Any], families: Collection[str]) -> str | None:
    """Return the decoder of a model with another head or none, if it is one of ``families``.

    A classifier is read as a decoder only if ``classifier_from_token`` says that its head consists of rows of the LM
    head.
    """
    ends = _HEADLESS if raw.get("classifier_from_token") else _HEADLESS[:1]
    names = [name.removesuffix(end) + _CAUSAL for name in _architectures(raw) for end in ends if name.endswith(end)]
    return next((name for name in names if name in families), None)


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    named = raw.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a decoder as its config.json states it."""

    hidden_size: int
    heads: int
    kv_heads: int
    """At most ``heads``; with grouped-query attention the KV cache has only these."""
    head_dim: int
    layers: int
    windows: Windows


def find_defaults(architecture: str) -> FamilyDefaults:
    return FAMILY_DEFAULTS.get(architecture, _LLAMA)


def read_attention(fields: Fields, defaults: FamilyDefaults) -> Attention:
    """Return the attention of a decoder; problems are added to those of ``fields``."""
    begin = len(fields.problems)
    hidden = _size(fields, "hidden_size", "n_embd")
    heads = _size(fields, "num_attention_heads", "n_head")
    kv_heads = fields.positive_int("num_key_value_heads", default=heads)
    head_dim = fields.positive_int("head_dim", default=defaults.head_dim or max(1, hidden // heads))
    if heads % kv_heads and len(fields.problems) == begin:
        fields.problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    layers = _size(fields, "num_hidden_layers", "n_layer", most=MAX_LAYERS)
    return Attention(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        windows=defaults.windows(fields, layers),
    )


def _size(fields: Fields, name: str, older: str, *, most: int | None = None) -> int:
    """Return a required size, which old configurations have under another name."""
    is_old = fields.raw.get(name) is None and fields.raw.get(older) is not None
    return fields.positive_int(older if is_old else name, most=most)


def stored_dtype(raw: Mapping[str, Any]) -> DTypeName | None:
    """Return the checkpoint's dtype in config.json: transformers 5 writes ``dtype``, 4 wrote ``torch_dtype``."""
    text = raw.get("text_config")
    for place in (raw, text if isinstance(text, Mapping) else {}):
        for name in ("dtype", "torch_dtype"):
            value: object = place.get(name)
            match value:
                case "float32" | "float16" | "bfloat16":
                    return value
    return None


def compute_dtype(
    asked: Literal["auto"] | DTypeName,
    stored: DTypeName | None,
    *,
    device: Literal["gpu", "cpu"],
    cpu_multiplies_bfloat16: bool = False,
    quantization: str | None = None,
) -> DTypeName:
    """Return the dtype of a model's arithmetic, which may be measured instead on a CPU.

    ``auto`` is the checkpoint's 16-bit type on a GPU, but bfloat16 with another type or none, or with weights in fp8,
    whose products have no other type. On a CPU it is bfloat16 if the CPU multiplies that natively, else float32.
    """
    if asked != "auto":
        return asked
    if device == "cpu":
        return "bfloat16" if cpu_multiplies_bfloat16 else "float32"
    return "float16" if stored == "float16" and quantization != "fp8" else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Attention):
    """The sizes of a decoder-only transformer."""

    family: str
    """The first of ``architectures``, else ``model_type``; shown to users."""
    intermediate_size: int
    experts: int
    """The number of feed-forward blocks per layer; 1 for a dense model."""
    vocab_size: int
    tied_embeddings: bool
    max_positions: int | None
    """The longest sequence that the model supports."""
    dtype: DTypeName | None
    """The dtype of the stored checkpoint; None if the config does not say."""
    kv_widths: tuple[int, ...]
    """The numbers of a token's keys by layer: KV heads × head dim."""

    @property
    def adapter_width(self) -> int:
        """The numbers of an adapter of rank 1 for every linear layer: the inputs and outputs of each module."""
        queries = self.heads * self.head_dim
        attention = sum(
            (self.hidden_size + queries) + 2 * (self.hidden_size + keys) + (queries + self.hidden_size)
            for keys in self.kv_widths
        )
        # Experts have no adapters.
        feed_forward = 3 * (self.hidden_size + self.intermediate_size) if self.experts == 1 else 0
        return attention + self.layers * feed_forward

    @property
    def parameters(self) -> int:
        """The number of parameters in the Llama layout; a close estimate for similar families."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden_size * self.experts if self.experts > 1 else 0
        feed_forward = 3 * self.hidden_size * self.intermediate_size * self.experts + router
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + feed_forward + norms) + embeddings + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The inputs of the capacity arithmetic."""

    config: ModelConfig
    parameters: int
    counted: bool
    """True if ``parameters`` was counted in the headers of the weight files, not computed from the config."""


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig | tuple[str, ...]:
    """Return the sizes in a config.json, or all reasons why it cannot be read."""
    problems: list[str] = []
    named = raw.get("architectures")
    named = named[0] if isinstance(named, list) and named else raw.get("model_type")
    family = named if isinstance(named, str) and named else "unknown"
    part = text_part(raw)
    decoder = family if part is None else str(part["architectures"][0])
    decoder = causal_architecture(raw, FAMILY_DEFAULTS) or decoder
    whole = Fields(raw, problems)
    fields = Fields(part, problems) if part is not None else whole
    if part is None and raw.get("text_config") is not None:
        fields = whole.section("text_config")
    defaults = find_defaults(decoder)
    attention = read_attention(fields, defaults)
    experts = fields.natural_int("num_local_experts", default=0) or fields.natural_int("num_experts", default=0) or 1
    inner = "moe_intermediate_size"
    if experts == 1 or fields.raw.get(inner) is None:
        inner = "intermediate_size"
    tied = [place.get(_TIED) for place in (raw, fields.raw)]
    longest = "max_position_embeddings"
    config = ModelConfig(
        **asdict(attention),
        family=family,
        intermediate_size=fields.positive_int(inner, default=4 * attention.hidden_size),
        experts=experts,
        vocab_size=fields.positive_int("vocab_size"),
        tied_embeddings=True in tied or (defaults.tie_word_embeddings and False not in tied),
        max_positions=None if fields.raw.get(longest) is None else fields.positive_int(longest),
        dtype=stored_dtype(raw),
        kv_widths=_kv_widths(fields, attention, has_global_heads=defaults is _GEMMA_4),
    )
    return tuple(problems) if problems else config


def draft_problems(
    *,
    target_vocab_size: int,
    draft_vocab_size: int,
    target_positions: int | None,
    draft_positions: int | None,
    has_windows: bool,
    remedy: str,
) -> list[str]:
    """Return the reasons why a draft model cannot propose tokens for a target; empty if it can.

    target_positions  tokens of the target's longest sequence, None if unknown; and so for the draft
    has_windows       whether one of the models has windows of attention
    remedy            the change that makes the target's longest sequence shorter
    """
    problems = []
    if draft_vocab_size != target_vocab_size:
        problems.append(f"its vocabulary has {draft_vocab_size:,} tokens, and the model's {target_vocab_size:,}")
    if target_positions is not None and draft_positions is not None and draft_positions < target_positions:
        problems.append(f"it supports {draft_positions:,} tokens, and the model {target_positions:,}: {remedy}")
    if has_windows:
        problems.append("draft models do not support sliding windows yet, which it or the model has")
    return problems


def _kv_widths(fields: Fields, attention: Attention, *, has_global_heads: bool) -> tuple[int, ...]:
    """Return KV heads × head dim by layer; ``per_layer_config`` or Gemma 4's fields may give layers their own."""
    kv_heads, head_dim, windows = attention.kv_heads, attention.head_dim, attention.windows
    if fields.raw.get("per_layer_config") is not None:
        own = fields.section("per_layer_config")
        layers = [own.section(str(layer)) for layer in range(len(windows))]
        return tuple(
            layer.positive_int("num_key_value_heads", default=kv_heads)
            * layer.positive_int("head_dim", default=head_dim)
            for layer in layers
        )
    if not has_global_heads:
        return (kv_heads * head_dim,) * len(windows)
    full_dim = fields.positive_int("global_head_dim", default=512)
    full_heads = fields.positive_int("num_global_key_value_heads", default=kv_heads)
    full_heads = full_heads if fields.raw.get("attention_k_eq_v") is True else kv_heads
    return tuple(full_heads * full_dim if window is None else kv_heads * head_dim for window in windows)
