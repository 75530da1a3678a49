"""A forward pass on shapes alone, before any weight is read, which records what a model's attention layers request.

The model is built on torch's meta device, where tensors have shapes and no values, with an attention function that
records its arguments. The result is what the model does, not what its configuration seems to say. ``layers`` evaluates
it.

Legend: T tokens of the pass.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers import initialization as transformers_initialization
from transformers.pytorch_utils import Conv1D

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function (batch, head, query position, key position) -> whether the query sees the key."""

PROBING = "quire_probe"
"""The ``attn_implementation`` of probing."""

_TOKENS = 5
_LOGITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments with which an attention layer called its function."""

    layer: str
    """The module's name in the model."""
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: "Mask | None"
    """None if the mask does not come from transformers' mask functions."""
    softcap: float | None
    has_metadata: bool
    """True if the metadata of the forward pass arrived here."""
    arguments: dict[str, Any]
    """All other arguments that are not None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    function: MaskFunction
    local_size: int | None
    """The tokens of a sliding window or a chunk, if the mask has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    calls: tuple[AttentionCall, ...]
    vocab_size: int
    logits_rows: int
    """The number of rows of logits after two were requested."""
    linears: tuple[str, ...]
    """The layers that only multiplied by their weights, so another format of the weights is possible."""


@dataclass(slots=True)
class _Recorder:
    names: dict[nn.Module, str] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)


class _MaskMark(Tensor):
    """A mask without contents that remembers its function."""

    mask: Mask


def build_on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model's modules, with parameters that have no values. The model's own code may raise any exception."""
    options: dict[str, Any] = {"attn_implementation": PROBING}
    if model_class._can_set_experts_implementation():
        options["experts_implementation"] = "batched_mm"  # the others select what to compute by values
    AttentionInterface.register(PROBING, _refuse_to_attend)
    AttentionMaskInterface.register(PROBING, _mark_mask)
    with torch.device("meta"), transformers_initialization.no_init_weights():
        return model_class._from_config(copy.deepcopy(config), **options).eval()


def run_probe(model: PreTrainedModel) -> Probe:
    """Run one pass of the meta model. The model's own code may raise any exception."""
    recorder = _Recorder(names={module: name for name, module in model.named_modules()})
    watched = _watch_linears(model)
    AttentionInterface.register(PROBING, _recording(recorder))
    with_padding = masking_utils.chunked_overlay
    masking_utils.chunked_overlay = _chunks_without_padding
    try:
        tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
        with torch.inference_mode():
            output = model(
                input_ids=tokens,
                # With a mask, transformers does not check the positions for several sequences, which have no values.
                attention_mask=torch.ones_like(tokens),
                position_ids=tokens,
                logits_to_keep=tokens[0, :_LOGITS],
                use_cache=False,
                quire_step=recorder,
            )
    finally:
        masking_utils.chunked_overlay = with_padding
        AttentionInterface.register(PROBING, _refuse_to_attend)
    return Probe(
        calls=tuple(recorder.calls),
        vocab_size=output.logits.shape[-1],
        logits_rows=output.logits.shape[1],
        linears=tuple(name for name, linear in watched.items() if linear.runs and not linear.looked_at),
    )


def _chunks_without_padding(chunk_size: int, left_padding: Tensor) -> MaskFunction:
    """Return the mask of chunks that start at position 0; the amount of padding would be a value."""
    return lambda batch, head, query, key: key // chunk_size == query // chunk_size


def _refuse_to_attend(*_: Any, **__: Any) -> Any:
    raise AssertionError("the probe's attention function outside a probe")


def _recording(recorder: _Recorder) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        softcap: float | None = None,
        quire_step: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        recorder.calls.append(
            AttentionCall(
                layer=recorder.names[module],
                query=tuple(query.shape),
                key=tuple(key.shape),
                value=tuple(value.shape),
                mask=getattr(attention_mask, "mask", None),  # a tensor computed from a mark has no mask
                softcap=softcap,
                has_metadata=quire_step is recorder,
                arguments={name: argument for name, argument in arguments.items() if argument is not None},
            )
        )
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    return attend


def _mark_mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, local_size: int | None = None, **_: Any
) -> Tensor:
    mark = torch.empty((1, 1, q_length, kv_length), device="meta").as_subclass(_MaskMark)
    mark.mask = Mask(function=mask_function, local_size=local_size)
    return mark


@dataclass(slots=True)
class _Watched:
    runs: int = 0
    looked_at: bool = False
    running: bool = False


def _watch_linears(model: nn.Module) -> dict[str, _Watched]:
    """Make each linear layer record when it runs, and when other code reads its weights."""
    watched = {}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D):
            watched[name] = note = _Watched()
            module.__class__ = _watched_class(type(module), note)
    return watched


def _watched_class(base: type[nn.Module], note: _Watched) -> type[nn.Module]:
    class Watched(base):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            note.runs += 1
            note.running = True
            try:
                return super().forward(x)
            finally:
                note.running = False

        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "bias") and not note.running:
                note.looked_at = True
            return super().__getattr__(name)

    return Watched
