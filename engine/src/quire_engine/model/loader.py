"""The loader of native models: configuration, checked weights, packed layers, and the time they took."""

import logging
import time
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, BuiltModel, Candidate, ModelImpl
from quire_engine.model.config import ModelConfig, load_config, unread_overrides, warn_of_unread
from quire_engine.model.decoder import find_family, has_own_lm_head
from quire_engine.model.families import SUPPORTED
from quire_engine.model.kv_scales import read_kv_scales
from quire_engine.model.model_part import WHOLE_MODEL, ModelPart, Split, divided, is_in_part
from quire_engine.model.shape import without_idle_windows
from quire_engine.model.text_part import decoder_config, text_config, text_tensor
from quire_engine.model.upload import make_upload
from quire_engine.model.weights import (
    RandomWeights,
    RenamedTensors,
    TensorReader,
    TensorSource,
    check_tensors,
    open_checkpoint,
    with_prefixes,
)
from quire_engine.model_folder import NO_OVERRIDES, ConfigOverrides, read_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCandidate:
    folder: Path
    shape: ModelConfig
    longest: int
    """The number of tokens of the longest sequence."""
    part_of: str | None = None
    """The architecture of the larger model whose text part this is."""
    part: ModelPart = WHOLE_MODEL
    whole: ModelConfig | None = None
    """The configuration of the whole model if ``shape`` is that of a part; None otherwise."""

    @property
    def served_by(self) -> str:
        whole = f", the text part of {self.part_of}: images are not served" if self.part_of else ""
        return f"quire's own {self.shape.architecture}{whole}"

    @property
    def is_native(self) -> bool:
        return True

    def limited_to(self, longest: int) -> "NativeCandidate":
        return replace(self, shape=without_idle_windows(self.shape, longest), longest=longest)

    def without_lm_head(self) -> "NativeCandidate":
        """Return the same candidate as a model of which only hidden states are read."""
        return replace(self, shape=replace(self.shape, has_lm_head=False, tie_word_embeddings=False))

    def divided(self, part: ModelPart) -> "NativeCandidate":
        """Return one rank's part of this candidate; call this last."""
        return replace(self, shape=divided(self.shape, part), part=part, whole=self.shape)

    def stages(self) -> list[ModelConfig]:
        """Return the configuration of the part of this rank on every stage."""
        whole = self.whole or self.shape
        return [divided(whole, replace(self.part, stage=stage)) for stage in range(self.part.stages)]

    def build(self, options: BuildOptions) -> BuiltModel:
        """Read the weights layer by layer; each is converted to the dtype and packed before the next is read."""
        started = time.perf_counter()
        config, family = self.whole or self.shape, find_family(self.shape.architecture)
        source: TensorSource
        if options.load_format == "dummy":
            source = RandomWeights(family.tensor_shapes(config, ()), seed=options.seed, device=options.device)
        else:
            source = open_checkpoint(self.folder, make_upload(options.device))
            source = with_prefixes(source if self.part_of is None else RenamedTensors(source, text_tensor))
        shape = self.shape
        if config.tie_word_embeddings and has_own_lm_head(source, options.dtype):
            _log.warning(
                "%s: config.json ties the LM head to the embedding, but the checkpoint has its own: it is used",
                self.folder.name,
            )
            config, shape = (replace(each, tie_word_embeddings=False) for each in (config, shape))
        expected = check_tensors(family, config, source.shapes(), str(self.folder))

        expected = {name: shape for name, shape in expected.items() if is_in_part(config, self.part, name)}
        # One more angle than the longest sequence has positions: a step may run ahead of the stop that ends it.
        splits = {name: family.split(config, self.part, name) for name in expected}
        read = TensorReader(source, options.dtype, splits.get)
        model = family.build(shape, read, options.backend, self.longest + 1, options.links)
        sizes = [_size(shape, splits[name]) for name, shape in expected.items()]
        numbers = sum(sizes)
        first, last = self.part.share(config.vocab_size)
        table = (last - first) * config.hidden_size if self.part.is_first else 0
        matrices = (size for size, shape in zip(sizes, expected.values(), strict=True) if len(shape) > 1)
        multiplied = sum(matrices) - table
        tied = config.tie_word_embeddings and self.part.stages == 1
        if tied and options.backend.copies:
            # Rows are looked up in one copy, and the LM head multiplies by the other, 2 to 5 times faster.
            numbers, multiplied = numbers + table, multiplied + table
        elif tied:
            tied, table = False, 0
        held = options.backend.bytes_per_weight
        weight_bytes = numbers * options.dtype.itemsize - multiplied * (options.dtype.itemsize - held)
        packed = time.perf_counter()
        if options.device.type == "cuda":
            torch.cuda.synchronize(options.device)
        seconds = time.perf_counter() - started
        _log.info(
            "loaded %s onto %s: %d tensors, %.1f MB as %s in %.2f s (%.0f MB/s)%s",
            self.folder.name,
            options.device,
            len(expected),
            weight_bytes / 1e6,
            options.backend.weights,
            seconds,
            weight_bytes / 1e6 / seconds,
            "; tied embeddings are held twice, once packed for the LM head" if tied else "",
        )
        return BuiltModel(
            model=model,
            weight_bytes=weight_bytes,
            bytes_per_weight=held,
            looked_up_bytes=table * options.dtype.itemsize,
            seconds=seconds,
            packing_seconds=max(0.0, packed - started - read.seconds),
            kv_scales=read_kv_scales(source.shapes().keys(), source, range(*self.part.layers(config.num_layers))),
        )


def _size(shape: tuple[int, ...], split: Split | None) -> int:
    """Return the number of elements of a tensor that the rank reads."""
    return prod(shape if split is None else split.shape(shape))


def find_native_candidate(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> NativeCandidate:
    """Return a native candidate. Raise ModelFolderError with every problem of the folder's configuration."""
    config = load_config(folder, SUPPORTED, overrides)
    raw = read_config(folder, overrides)
    return NativeCandidate(
        folder=folder,
        shape=config,
        longest=config.max_position_embeddings,
        part_of=None if text_config(raw) is None else str(raw["architectures"][0]),
    )


def find_candidate(
    folder: Path, *, impl: ModelImpl, trust_remote_code: bool, overrides: ConfigOverrides = NO_OVERRIDES
) -> Candidate:
    """Return a native or a transformers candidate. Raise ModelFolderError with the reasons if there is neither."""
    if impl == "transformers" or (impl == "auto" and not _is_native(folder, overrides)):
        from quire_engine.model.transformers_backend.candidate import find_transformers_candidate

        return find_transformers_candidate(folder, trust_remote_code=trust_remote_code, overrides=overrides)
    candidate = find_native_candidate(folder, overrides)
    warn_of_unread(unread_overrides(folder, SUPPORTED, overrides), candidate.served_by)
    return candidate


def _is_native(folder: Path, overrides: ConfigOverrides) -> bool:
    """Return whether there is a family for the architecture; the native loader also reports unreadable folders."""
    try:
        raw = read_config(folder, overrides)
    except ModelFolderError:
        return True
    architectures = decoder_config(raw).get("architectures")
    return isinstance(architectures, list) and any(name in SUPPORTED for name in architectures)
