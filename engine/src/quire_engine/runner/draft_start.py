"""The draft model at start-up: whether it suits a target, its weights, and the layers of both together."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_common import model_memory
from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, Candidate
from quire_engine.model.family import CausalLM
from quire_engine.model.loader import find_candidate
from quire_engine.model.shape import ModelShape
from quire_engine.model.weights import open_checkpoint
from quire_engine.model_folder import read_config

_log = logging.getLogger(__name__)

_HEADS: Final[Mapping[str, str]] = {
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "medusa": "Medusa heads",
    "mlpspeculator": "an MLP speculator",
    "mtp": "layers for multi-token prediction (MTP)",
}
"""The kinds of published draft heads, which read a target's hidden states, by a part of their architecture or model
type without separators."""
_FUSES = ("fc.weight", "model.fc.weight")
"""The tensor of EAGLE heads that joins hidden states and embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft model in memory."""

    model: CausalLM
    weight_bytes: int
    shape: ModelShape
    max_tokens: int
    """The most drafts of a sequence in a step."""


def find_draft(config: EngineConfig, target: Candidate, *, longest: int) -> Candidate | None:
    """Return the draft model that the options name, for sequences of at most ``longest`` tokens.

    Return None without one, or if it cannot be used and is not required. Raise FlagsError if it is.
    """
    options = config.speculation
    if options is None or options.model is None:
        return None
    try:
        if (kind := head_kind(options.model)) is not None:
            raise ModelFolderError(f"it is {kind}, not a smaller model with the same tokenizer")
        found = find_candidate(options.model, impl="native", trust_remote_code=False)
        problems = draft_problems(target.shape, found.shape, longest=longest)
        if not problems and not same_tokens(config.text.tokenizer or config.model.path, options.model):
            problems = ["its tokenizer gives texts other token ids than the target's"]
    except ModelFolderError as error:
        problems = [str(error)]
    if not problems:
        return found.limited_to(longest)
    message = f"--spec-model {options.model}: {'; '.join(problems)}"
    if options.required:
        remedy = "choose another one, or leave it out; --no-spec-required starts without it"
        raise FlagsError([f"{message}. {remedy}"])
    _log.warning("serves without speculation: %s", message)
    return None


def head_kind(folder: Path) -> str | None:
    """Return the kind of draft head in a folder; None if it contains a model."""
    raw: Mapping[str, Any] = read_config(folder)
    named = raw.get("architectures")
    names = [*(named if isinstance(named, list) else ()), raw.get("model_type"), raw.get("speculators_model_type")]
    plain = [name.lower().replace("_", "").replace("-", "") for name in names if isinstance(name, str)]
    for part, kind in _HEADS.items():
        if any(part in name for name in plain):
            return kind
    # Some heads have the architecture of their layers. Only EAGLE-3 heads have a vocabulary of their own.
    if "draft_vocab_size" in raw:
        return _HEADS["eagle3"]
    has_weights = any(folder.glob("*.safetensors"))
    return _HEADS["eagle"] if has_weights and not set(_FUSES).isdisjoint(open_checkpoint(folder).shapes()) else None


def draft_problems(target: ModelShape, draft: ModelShape, *, longest: int) -> list[str]:
    """Return the reasons why a draft model cannot propose tokens for a target; empty if it can."""
    return model_memory.draft_problems(
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft.vocab_size,
        target_positions=longest,
        draft_positions=draft.max_position_embeddings,
        has_windows=(target.kv_groups, draft.kv_groups) != ((None,), (None,)),
        remedy=f"set --max-model-len to {draft.max_position_embeddings} or less",
    )


def same_tokens(target: Path, draft: Path) -> bool:
    """Return whether two folders' tokenizer.json have the same ids; True if one of them has no such file."""
    vocabularies = [_token_ids(folder / "tokenizer.json") for folder in (target, draft)]
    return None in vocabularies or vocabularies[0] == vocabularies[1]


def _token_ids(path: Path) -> object:
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return document["model"]["vocab"], [token["content"] for token in document.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(f"{path} is not a tokenizer: {error}") from error


def build_draft(config: EngineConfig, candidate: Candidate | None, options: BuildOptions) -> Draft | None:
    """Read the weights of the draft model; return None if that fails and it is not required."""
    speculation = config.speculation
    if candidate is None or speculation is None:
        return None
    try:
        built = candidate.build(options)
    except ModelFolderError as error:
        if speculation.required:
            raise
        _log.warning("serves without speculation: %s cannot be loaded: %s", speculation.model, error)
        return None
    return Draft(
        model=built.model,
        weight_bytes=built.weight_bytes,
        shape=candidate.shape,
        max_tokens=speculation.max_tokens,
    )


def with_draft_layers(target: ModelShape, draft: ModelShape) -> ModelShape:
    """Return the shape of the KV cache of both models: the target's layers, then the draft model's."""
    return ModelShape(
        architecture=target.architecture,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=target.eos_token_ids,
        num_layers=target.num_layers + draft.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        windows=(*target.windows, *draft.windows),
        uneven_heads=(*target.layer_heads, *draft.layer_heads),
    )
