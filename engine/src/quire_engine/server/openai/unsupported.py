"""Fields of OpenAI's and vLLM's APIs that this version does not support: they are refused by name, never ignored.

A value without an effect (null, an empty list, the default) is removed, so that clients that send every field work.
"""

from collections.abc import Collection, Mapping
from typing import Any

NO_EFFECT: tuple[Any, ...] = (None, [], {}, False)
"""The values without an effect in a field of this table."""
EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""The values without an effect in a field that is unknown."""

_CHAT_ONLY = "only POST /v1/chat/completions has it"
_FUNCTIONS = "is not supported, because tools and tool_choice have replaced it"
_TEXT_ONLY = "only text is supported by this version"

Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields with further values that have no effect, and the reason to refuse all others."""

UNSUPPORTED: Unsupported = {
    "tools": ((), _CHAT_ONLY),
    "tool_choice": (("none", "auto"), _CHAT_ONLY),
    "parallel_tool_calls": ((True,), _CHAT_ONLY),
    "functions": ((), _FUNCTIONS),
    "function_call": (("none", "auto"), _FUNCTIONS),
    "modalities": ((["text"],), 'only ["text"] is supported by this version'),
    "audio": ((), "audio is not supported by this version"),
    "include_reasoning": ((True,), _CHAT_ONLY),
    "thinking_token_budget": ((), _CHAT_ONLY),
    "detokenize": ((True,), "answers always have text"),
    "return_tokens_as_token_ids": ((), "is not supported by this version; return_token_ids returns the ids"),
    "logprob_token_ids": ((), "is not supported by this version"),
    "return_token_offsets": ((), "is not supported by this version"),
    "return_prompt_text": ((), "is not supported by this version; /detokenize returns the text of tokens"),
    "prompt_embeds": ((), "embeddings as prompts are not supported by this version"),
    "repetition_detection": ((), "is not supported by this version"),
    "watermarking": ((), "is not supported by this version"),
    "kv_transfer_params": ((), "the transfer of KV caches is not supported by this version"),
    "ec_transfer_params": ((), "the transfer of encoder caches is not supported by this version"),
    "mm_processor_kwargs": ((), _TEXT_ONLY),
    "media_io_kwargs": ((), _TEXT_ONLY),
    "mm_payload": ((), _TEXT_ONLY),
    "return_mm_kwargs": ((), _TEXT_ONLY),
    "routed_experts_prompt_start": ((0,), "is not supported by this version"),
    "suffix": (("",), "filling in the middle is not supported by this version"),
    "prediction": ((), "predicted outputs are not supported by this version"),
    "moderation": ((), "moderation is not supported by this version"),
    "web_search_options": ((), "web search is not supported by this version"),
    "best_of": ((1,), "is not supported; use n, which returns as many answers, and choose among them"),
    "use_beam_search": ((), "beam search is not supported by this version"),
    "documents": ((), "is not supported by this version; put the documents into a message"),
    "chat_template": ((), "is not supported in requests; start the server with --chat-template"),
    "logits_processors": ((), "is not supported by this version"),
}


def remove_empty(content: dict[str, Any], known: Collection[str]) -> None:
    """Remove unknown fields without a value: whatever they mean, the client sets nothing."""
    for name in content.keys() - set(known):
        if any(content[name] == each and type(content[name]) is type(each) for each in EMPTY):
            del content[name]


def remove_unsupported(
    content: dict[str, Any], known: Collection[str], unsupported: Unsupported = UNSUPPORTED
) -> list[str]:
    """Remove unsupported fields from the body, and return the reasons to refuse those that would have an effect.

    ``known`` are the fields that the route supports.
    """
    reasons = []
    for name in (unsupported.keys() & content.keys()) - set(known):
        harmless, reason = unsupported[name]
        value = content.pop(name)
        if not any(value == each and type(value) is type(each) for each in (*NO_EFFECT, *harmless)):
            reasons.append(f"{name}: {reason}")
    return sorted(reasons)
