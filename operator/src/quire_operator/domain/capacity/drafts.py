"""The needs of a draft model or a draft head, and the reasons why it cannot propose tokens for a target. Pure.

The engine checks this too, and the tokenizers, when it starts: after both models were downloaded.
"""

from quire_operator.domain.capacity.model_config import ModelConfig, ModelFacts
from quire_operator.domain.resource import Spec
from quire_operator.domain.resource.speculation import SpeculationMethod

_LEAST_KEPT_TOKENS, _DEFAULT_MAX_TOKENS = 64, 8
"""The tokens of a sequence whose hidden states an engine keeps for a head, unless more are verified in a step."""


def is_head(spec: Spec) -> bool:
    """Return whether the draft of a spec is a head over the model's hidden states."""
    return spec.engine.speculation is not None and spec.engine.speculation.method is SpeculationMethod.EAGLE


def draft_parameters(spec: Spec, draft: ModelFacts) -> int:
    """Return the number of parameters that the engine reads of a draft model or a head."""
    config = draft.config
    if draft.counted or not is_head(spec):
        return draft.parameters
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return config.parameters - embeddings + 2 * config.hidden_size**2


def head_state_bytes(spec: Spec, draft: ModelConfig, width: int) -> int:
    """Return the memory of the hidden states that are kept for a head, of ``width`` bytes per number."""
    speculation = spec.engine.speculation
    if speculation is None or not is_head(spec):
        return 0
    tokens = max(_LEAST_KEPT_TOKENS, (speculation.max_tokens or _DEFAULT_MAX_TOKENS) + 1)
    return spec.engine.max_sequences * tokens * draft.hidden_size * width


def draft_problems(spec: Spec, target: ModelConfig, draft: ModelConfig) -> list[str]:
    """Return the reasons against the draft model; empty if it is suitable."""
    problems = []
    if draft.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {draft.vocab_size:,} tokens, and the model's {target.vocab_size:,}")
    longest = spec.engine.max_model_length or target.max_positions
    if longest is not None and draft.max_positions is not None and draft.max_positions < longest:
        problems.append(
            f"it supports {draft.max_positions:,} tokens, and the model {longest:,}: set spec.engine.maxModelLength to "
            f"{draft.max_positions} or less"
        )
    if any(window is not None for config in (target, draft) for window in config.windows):
        problems.append("draft models do not support sliding windows yet, which it or the model has")
    if is_head(spec) and draft.hidden_size != target.hidden_size:
        problems.append(
            f"it reads hidden states of {draft.hidden_size:,} numbers, and the model's have {target.hidden_size:,}: "
            "use a head that was trained for this model"
        )
    return problems
