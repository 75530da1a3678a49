"""Token counts in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from quire_engine.server.choice import Choice


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """A prompt counts once, however many answers it got."""
    firsts = choices[::n]
    prompt = sum(len(choice.prompt_token_ids) for choice in firsts)
    completion = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }
