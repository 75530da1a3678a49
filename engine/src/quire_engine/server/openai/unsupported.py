"""Fields of OpenAI's and vLLM's APIs that this version does not support: they are refused by name, never ignored.

A value without an effect (null, an empty list, the default) is removed, so that clients that send every field work.
"""

from typing import Any

NO_EFFECT: tuple[Any, ...] = (None, [], {}, False)
"""The values without an effect in any field."""

_TOOLS = "tool calling is not supported by this version"
_STRUCTURED = "structured output is not supported by this version"

# By field: further values without an effect, and the reason to give for all others.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "parallel_tool_calls": ((True,), _TOOLS),
    "functions": ((), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "response_format": (({"type": "text"},), f'{_STRUCTURED}; only {{"type": "text"}} is supported'),
    "structured_outputs": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "modalities": ((["text"],), 'only ["text"] is supported by this version'),
    "audio": ((), "audio is not supported by this version"),
    "reasoning_effort": ((), "is not supported; set it in chat_template_kwargs if the model's chat template reads it"),
    "verbosity": (("medium",), 'only "medium" is supported by this version'),
    "suffix": (("",), "filling in the middle is not supported by this version"),
    "prediction": ((), "predicted outputs are not supported by this version"),
    "moderation": ((), "moderation is not supported by this version"),
    "web_search_options": ((), "web search is not supported by this version"),
    "use_beam_search": ((), "beam search is not supported by this version"),
    "documents": ((), "is not supported by this version; put the documents into a message"),
    "chat_template": ((), "is not supported in requests; start the server with --chat-template"),
    "logits_processors": ((), "is not supported by this version"),
}


def remove_unsupported(content: dict[str, Any]) -> list[str]:
    """Remove unsupported fields from the body, and return the reasons to refuse those that would have an effect."""
    reasons = []
    for name in UNSUPPORTED.keys() & content.keys():
        harmless, reason = UNSUPPORTED[name]
        value = content.pop(name)
        if not any(value == each and type(value) is type(each) for each in (*NO_EFFECT, *harmless)):
            reasons.append(f"{name}: {reason}")
    return sorted(reasons)
