"""The reasons why a draft model cannot propose tokens for a target. Pure.

The engine checks this too, and the tokenizers, when it starts: after both models were downloaded.
"""

from quire_operator.domain.capacity.model_config import ModelConfig
from quire_operator.domain.resource import Spec


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
    return problems
