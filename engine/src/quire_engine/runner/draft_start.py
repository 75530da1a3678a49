"""The draft model at start-up: whether it can serve a target, its weights, and the layers that both have together."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, BuiltModel, Candidate
from quire_engine.model.loader import find_candidate
from quire_engine.model.shape import ModelShape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft model in memory."""

    built: BuiltModel
    shape: ModelShape


def find_draft(config: EngineConfig, target: ModelShape, *, longest: int) -> Candidate | None:
    """Return the draft model that the options name, for sequences of at most ``longest`` tokens.

    Return None without one, or if it cannot be used and is not required. Raise FlagsError if it is.
    """
    options = config.speculation
    if options is None or options.model is None:
        return None
    try:
        found = find_candidate(options.model, impl="native", trust_remote_code=False)
        problems = draft_problems(target, found.shape, longest=longest)
        if not problems and not same_tokens(config.text.tokenizer or config.model.path, options.model):
            problems = ["its tokenizer gives texts other token ids than the target's"]
    except ModelFolderError as error:
        problems = [str(error)]
    if not problems:
        return found.limited_to(longest)
    message = f"--spec-model {options.model}: {'; '.join(problems)}"
    if options.required:
        remedy = "choose another draft model, or leave it out; --no-spec-required starts without it"
        raise FlagsError([f"{message}. {remedy}"])
    _log.warning("serves without speculation: %s", message)
    return None


def draft_problems(target: ModelShape, draft: ModelShape, *, longest: int) -> list[str]:
    """Return the reasons why a draft model cannot propose tokens for a target; empty if it can."""
    problems = []
    if draft.vocab_size != target.vocab_size:
        problems.append(f"it has {draft.vocab_size} tokens in its vocabulary, and the target {target.vocab_size}")
    if draft.max_position_embeddings < longest:
        problems.append(
            f"its context of {draft.max_position_embeddings} tokens is shorter than the target's {longest}: lower"
            " --max-model-len"
        )
    if target.kv_groups != (None,):
        problems.append("the target has windows of attention, which draft models do not support yet")
    if draft.kv_groups != (None,):
        problems.append("it has windows of attention, which draft models do not support yet")
    return problems


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
        return Draft(built=candidate.build(options), shape=candidate.shape)
    except ModelFolderError as error:
        if speculation.required:
            raise
        _log.warning("serves without speculation: the draft model cannot be loaded: %s", error)
        return None


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
