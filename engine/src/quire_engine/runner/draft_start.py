"""The draft model or head at start-up: whether it suits a target, its weights, and the layers of both together."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig, SpeculationOptions
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, BuiltModel, Candidate
from quire_engine.model.eagle import EagleHead, HeadCandidate, find_head, head_problems, is_head, unsupported_head
from quire_engine.model.family import CausalLM
from quire_engine.model.layers import DecoderStack
from quire_engine.model.loader import find_candidate
from quire_engine.model.shape import ModelShape
from quire_engine.runner.draft_model import Drafter, DraftModel
from quire_engine.runner.eagle_drafts import EagleDrafts, kept_bytes
from quire_kernels.kv_cache import KVCache

_log = logging.getLogger(__name__)

DraftCandidate = Candidate | HeadCandidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft model or a draft head in memory."""

    model: CausalLM | EagleHead
    weight_bytes: int
    shape: ModelShape
    max_tokens: int
    """The most drafts of a sequence in a step."""
    state_bytes: int = 0
    """The memory of what is kept of each row."""
    pass_bytes: int
    """The bytes of all weights that one pass reads."""

    def make_drafter(
        self, caches: tuple[KVCache, ...], layout: KVCacheLayout, *, max_rows: int, max_model_len: int
    ) -> Drafter:
        """Return the runner's source of drafts; ``caches`` are those of its own layers."""
        if isinstance(self.model, EagleHead):
            return EagleDrafts(
                self.model,
                caches,
                layout,
                max_rows=max_rows,
                max_model_len=max_model_len,
                max_drafts=self.max_tokens,
            )
        return DraftModel(self.model, caches, layout, max_rows=max_rows, max_model_len=max_model_len)


def find_draft(config: EngineConfig, target: Candidate, *, longest: int) -> DraftCandidate | None:
    """Return the draft model or head that the options name, for sequences of at most ``longest`` tokens.

    Return None without one, or if it cannot be used and is not required. Raise FlagsError if it is.
    """
    options = config.speculation
    if options is None or options.model is None:
        return None
    try:
        found: DraftCandidate
        if options.method == "eagle":
            found = find_head(options.model)
            problems = head_problems(target, found.shape)
        elif is_head(options.model):
            raise ModelFolderError("it is a draft head, not a model: use --spec-method eagle")
        elif (kind := unsupported_head(options.model)) is not None:
            raise ModelFolderError(f"it is {kind}, not a model; heads of this kind are not supported")
        else:
            found = find_candidate(options.model, impl="native", trust_remote_code=False)
            problems = []
        problems = [*draft_problems(target.shape, found.shape, longest=longest), *problems]
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


def build_draft(
    config: EngineConfig, candidate: DraftCandidate | None, options: BuildOptions, target: BuiltModel
) -> Draft | None:
    """Read the weights of the draft model or head; return None if that fails and it is not required."""
    speculation = config.speculation
    if candidate is None or speculation is None:
        return None
    try:
        if isinstance(candidate, HeadCandidate):
            return _build_head(config, speculation, candidate, options, target)
        built = candidate.build(options)
    except ModelFolderError as error:
        if speculation.required:
            raise
        _log.warning("serves without speculation: %s cannot be loaded: %s", speculation.model, error)
        return None
    return Draft(
        model=built.model,
        weight_bytes=built.weight_bytes,
        pass_bytes=built.weight_bytes,
        shape=candidate.shape,
        max_tokens=speculation.max_tokens,
    )


def _build_head(
    config: EngineConfig,
    speculation: SpeculationOptions,
    candidate: HeadCandidate,
    options: BuildOptions,
    target: BuiltModel,
) -> Draft:
    built = candidate.build(options, cast("DecoderStack", target.model))
    shape = candidate.shape
    lm_head_bytes = shape.vocab_size * shape.hidden_size * options.backend.bytes_per_weight
    return Draft(
        model=built.head,
        weight_bytes=built.weight_bytes,
        pass_bytes=built.weight_bytes + lm_head_bytes,
        shape=shape,
        max_tokens=speculation.max_tokens,
        state_bytes=kept_bytes(
            max_rows=config.scheduler.max_num_seqs,
            max_drafts=speculation.max_tokens,
            hidden_size=shape.hidden_size,
            dtype=options.dtype,
        ),
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
