"""Draft heads in the layout of EAGLE: one decoder layer or a few, over the target's hidden states.

A head (EAGLE, arXiv 2401.15077) reads the target's hidden state of token i, as it enters the LM head, and the embedding
of token i + 1. It returns the hidden state that it expects of token i + 1, which is its next input if no better one is
known. Embedding and LM head are the target's own; copies of them in a checkpoint are not read.

Legend: T tokens, R rows that are read, H hidden size, V vocabulary.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, Candidate
from quire_engine.model.config import ModelConfig, parse_config
from quire_engine.model.decoder import build_layers, layer_shapes
from quire_engine.model.families import Traits
from quire_engine.model.layers import DecoderLayer, DecoderStack, ModelInputs, run_layers
from quire_engine.model.linear import Linear
from quire_engine.model.recordings import Recordings
from quire_engine.model.shape import ModelShape, without_idle_windows
from quire_engine.model.upload import make_upload
from quire_engine.model.weights import (
    RandomWeights,
    RenamedTensors,
    TensorReader,
    TensorSource,
    compare_tensors,
    open_checkpoint,
)
from quire_engine.model_folder import read_config
from quire_kernels.embedding import embed
from quire_kernels.kv_cache import KVCache

_DECODER: Final = "LlamaForCausalLM"
ARCHITECTURES = ("EagleLlamaForCausalLM", _DECODER)
"""The names of heads over Llama layers: the second is that of the first published ones."""
_OTHER_KINDS: Final[Mapping[str, str]] = {
    "eagle3": "an EAGLE-3 head, which reads hidden states of several layers",
    "medusa": "Medusa heads, which each guess another of the next tokens",
    "mlpspeculator": "an MLP speculator, which has no attention",
    "mtp": "layers for multi-token prediction (MTP), which belong to one model family",
}
"""Kinds of published heads that are not supported, by a part of their architecture or model type without separators."""
_TRAITS = Traits(bare_first_layer=True)
_PREFIX = "model."
_FUSE, _FUSE_BIAS = "model.fc.weight", "model.fc.bias"
_OF_TARGET = ("model.embed_tokens.weight", "model.lm_head.weight")
_FIRST_NORM = "model.layers.0.input_layernorm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """A draft head with the target whose embedding and LM head it shares."""

    fuse: Linear  # 2 H to H
    layers: tuple[DecoderLayer, ...]
    target: DecoderStack
    recordings: Recordings = field(init=False, repr=False, compare=False, default_factory=Recordings)

    def __call__(self, inputs: ModelInputs, hidden: Tensor, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the expected hidden states [R, H] of ``inputs.logits_rows``.

        inputs  ``token_ids`` are the tokens after those of ``hidden`` [T, H]; positions and slots are those of
                ``hidden``
        """
        embedded = embed(inputs.token_ids, self.target.embedding)  # [T, H]
        residual = self.fuse(torch.cat((embedded, hidden), dim=-1))  # [T, H]
        addend, residual = run_layers(self.layers, residual, inputs, caches, self.recordings, inputs.logits_rows)
        return residual if addend is None else residual + addend

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of expected hidden states [R, H]."""
        return self.target.logits(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltHead:
    """A head in memory."""

    head: EagleHead
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCandidate:
    """A head before its weights are read."""

    folder: Path
    shape: ModelConfig
    longest: int
    """The number of tokens of the longest sequence."""

    def limited_to(self, longest: int) -> "HeadCandidate":
        """Return the same head for sequences of at most ``longest`` tokens."""
        return replace(self, shape=without_idle_windows(self.shape, longest), longest=longest)

    def build(self, options: BuildOptions, target: DecoderStack) -> BuiltHead:
        """Read the weights. Raise ModelFolderError."""
        source: TensorSource
        if options.load_format == "dummy":
            source = RandomWeights(_tensor_shapes(self.shape, ()), seed=options.seed, device=options.device)
        else:
            stored = open_checkpoint(self.folder, make_upload(options.device))
            # Published heads leave out the prefix.
            source = RenamedTensors(stored, lambda name: _PREFIX + name.removeprefix(_PREFIX))
        found = source.shapes()
        if _FUSE not in found:
            raise ModelFolderError(
                f"{self.folder} is not an EAGLE head: it has no tensor fc.weight. "
                "For a smaller model, use --spec-method draft_model"
            )
        expected = _tensor_shapes(self.shape, found.keys())
        compare_tensors(
            expected, found, is_ignorable=_is_ignorable, architecture="an EAGLE head", where=str(self.folder)
        )
        read = TensorReader(source, options.dtype)
        bias = read(_FUSE_BIAS) if _FUSE_BIAS in expected else None
        fuse = options.backend.pack(read(_FUSE), bias)
        layers = build_layers(_TRAITS, self.shape, read, options.backend, self.longest + 1, options.device)
        sizes = [(prod(shape), len(shape) > 1) for shape in expected.values()]
        held = (options.dtype.itemsize, options.backend.bytes_per_weight)
        return BuiltHead(
            head=EagleHead(fuse=fuse, layers=layers, target=target),
            weight_bytes=sum(size * held[is_matrix] for size, is_matrix in sizes),
        )


def find_head(folder: Path) -> HeadCandidate:
    """Return the head in a folder. Raise ModelFolderError with every problem of its configuration."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is not a folder; a draft head is a folder in Hugging Face layout")
    raw = read_config(folder)
    if not raw:
        raise ModelFolderError(f"{folder} has no config.json; a draft head is a folder in Hugging Face layout")
    problems = [] if _names(raw, ARCHITECTURES) and _other_kind(raw) is None else [_architecture_problem(raw)]
    config = parse_config({**raw, "architectures": [_DECODER]}, {}, (_DECODER,), problems)
    if config is None:
        raise ModelFolderError("\n  - ".join([f"{folder / 'config.json'} cannot be used as a draft head:", *problems]))
    return HeadCandidate(folder=folder, shape=config, longest=config.max_position_embeddings)


def is_head(folder: Path) -> bool:
    """Return whether config.json says that a folder is a head; the first published ones do not say so."""
    return _names(read_config(folder), ARCHITECTURES[:1])


def unsupported_head(folder: Path) -> str | None:
    """Return the kind of head that a folder is by its config.json, if heads of this kind are not supported."""
    return _other_kind(read_config(folder))


def _other_kind(raw: Mapping[str, Any]) -> str | None:
    named = raw.get("architectures")
    names = [*(named if isinstance(named, list) else ()), raw.get("model_type"), raw.get("speculators_model_type")]
    plain = [name.lower().replace("_", "").replace("-", "") for name in names if isinstance(name, str)]
    for part, kind in _OTHER_KINDS.items():
        if any(part in name for name in plain):
            return kind
    # Some EAGLE-3 heads have the architecture of their layers; only they have a vocabulary of their own.
    return _OTHER_KINDS["eagle3"] if "draft_vocab_size" in raw else None


def _names(raw: Mapping[str, Any], architectures: tuple[str, ...]) -> bool:
    named = raw.get("architectures")
    return isinstance(named, list) and any(name in architectures for name in named)


def _architecture_problem(raw: Mapping[str, Any]) -> str:
    named, kind = raw.get("architectures"), _other_kind(raw)
    found = f"architectures is {named!r}" if kind is None else f"it is {kind} (architectures is {named!r})"
    return f"{found}; supported heads are {' and '.join(ARCHITECTURES)} (EAGLE-1 over Llama layers)"


def head_problems(target: Candidate, head: ModelShape) -> list[str]:
    """Return the reasons why a head cannot read a target's hidden states, in addition to those of any draft model."""
    problems = []
    if not target.is_native:
        problems.append(f"heads are for quire's own model families, and the target is {target.served_by}")
    if head.hidden_size != target.shape.hidden_size:
        problems.append(
            f"it reads hidden states of {head.hidden_size} numbers (hidden_size), and the target's have"
            f" {target.shape.hidden_size}"
        )
    return problems


def _tensor_shapes(config: ModelConfig, names: Collection[str]) -> Mapping[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_FUSE: (hidden, 2 * hidden)}
    if _FUSE_BIAS in names:
        shapes[_FUSE_BIAS] = (hidden,)
    for index in range(config.num_layers):
        for name, shape in layer_shapes(_TRAITS, config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    del shapes[_FIRST_NORM]
    return shapes


def _is_ignorable(name: str) -> bool:
    return name in _OF_TARGET or name == _FIRST_NORM or name.endswith(".rotary_emb.inv_freq")
