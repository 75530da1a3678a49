"""A model folder that transformers can run: evaluated without its weights, then built. See the package's docstring."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, BuiltModel
from quire_engine.model.shape import ModelShape, without_idle_windows
from quire_engine.model.transformers_backend import attention, checkpoint
from quire_engine.model.transformers_backend.description import Description, Unservable, describe, name_of
from quire_engine.model.transformers_backend.layers import AttentionLayers, judge
from quire_engine.model.transformers_backend.model import TransformersModel
from quire_engine.model.transformers_backend.probe import PROBING, Probe, build_on_meta, run_probe
from quire_engine.model.transformers_backend.self_test import check_faithful
from quire_engine.model_folder import NO_OVERRIDES, ConfigOverrides

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersCandidate:
    folder: Path
    description: Description
    layers: AttentionLayers
    packable: tuple[str, ...]
    """The linear layers whose weights may be stored in another format."""
    shape: ModelShape

    @property
    def served_by(self) -> str:
        return f"transformers' {self.description.model_class.__name__}"

    @property
    def is_native(self) -> bool:
        return False

    def limited_to(self, longest: int) -> "TransformersCandidate":
        return replace(self, shape=without_idle_windows(self.shape, longest))

    def build(self, options: BuildOptions) -> BuiltModel:
        started = time.perf_counter()
        attention.register()
        if options.load_format == "dummy":
            model = checkpoint.random_weights(self.description, options.dtype, options.seed, options.device)
        else:
            model = checkpoint.load_weights(self.folder, self.description, options.dtype, options.device)
        weight_bytes, looked_up_bytes = checkpoint.weight_bytes(model), checkpoint.looked_up_bytes(model)
        held = options.backend.bytes_per_weight
        weight_bytes -= checkpoint.packed_numbers(model, self.packable) * (options.dtype.itemsize - held)
        checkpoint.pack_linears(model, self.packable, options.backend)
        loaded = time.perf_counter()
        served = TransformersModel(model, self.layers, self.shape.windows)
        check_faithful(model, served, self.shape, options.dtype, options.device)
        _log.info(
            "loaded %s onto %s: %.1f MB as %s in %.2f s (%.0f MB/s), checked against its own forward pass in %.2f s",
            self.folder.name,
            options.device,
            weight_bytes / 1e6,
            options.backend.weights,
            loaded - started,
            weight_bytes / 1e6 / (loaded - started),
            time.perf_counter() - loaded,
        )
        return BuiltModel(
            model=served,
            weight_bytes=weight_bytes,
            bytes_per_weight=held,
            looked_up_bytes=looked_up_bytes,
            seconds=time.perf_counter() - started,
        )


def find_transformers_candidate(
    folder: Path, *, trust_remote_code: bool, overrides: ConfigOverrides = NO_OVERRIDES
) -> TransformersCandidate:
    """Return a candidate. Raise ModelFolderError with the reason why transformers cannot run it with our cache."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        description = describe(folder, trust_remote_code=trust_remote_code, overrides=overrides)
        layers, probe = judge_class(description)
    except Unservable as error:
        raise ModelFolderError(f"{folder} cannot be served: {name_of(folder)} {error}") from error
    if description.runs_folder_code:
        _log.warning("%s: code of the model folder's own runs in the engine process (--trust-remote-code)", folder)
    return TransformersCandidate(
        folder=folder,
        description=description,
        layers=layers,
        packable=probe.linears,
        shape=make_shape(description, layers, probe),
    )


def judge_class(description: Description) -> tuple[AttentionLayers, Probe]:
    """Return the attention layers of this class and configuration. Raise Unservable if they are not supported."""
    try:
        probe = run_probe(build_on_meta(description.model_class, description.config))
    except Exception as error:  # the model's own code runs on tensors without values
        if isinstance(error, KeyError) and error.args == (PROBING,):
            raise Unservable("does not let quire choose its attention") from error
        raise Unservable(
            "failed in a trial run on shapes, which shows its attention:"
            f" {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    return judge(probe), probe


def _size(config: Any, *names: str) -> int | None:
    """Return the first of these fields that is a number; families name them differently."""
    found = (getattr(config, name, None) for name in names)
    return next((size for size in found if isinstance(size, int) and size > 0), None)


def make_shape(description: Description, layers: AttentionLayers, probe: Probe) -> ModelShape:
    widest = max(layers.heads, key=lambda heads: heads.kv_heads * heads.head_dim)
    return ModelShape(
        architecture=description.model_class.__name__,
        vocab_size=probe.vocab_size,
        max_position_embeddings=description.max_position_embeddings,
        eos_token_ids=tuple(token for token in description.eos_token_ids if token < probe.vocab_size),
        num_layers=len(layers.names),
        num_heads=max(heads.heads for heads in layers.heads),
        num_kv_heads=widest.kv_heads,
        head_dim=widest.head_dim,
        hidden_size=_size(description.config, "hidden_size", "n_embd") or widest.heads * widest.head_dim,
        intermediate_size=_size(description.config, "intermediate_size", "ffn_dim", "n_inner")
        or 4 * widest.heads * widest.head_dim,
        windows=layers.windows,
        chunked=layers.chunked,
        uneven_heads=layers.heads if len(set(layers.heads)) > 1 else (),
    )
