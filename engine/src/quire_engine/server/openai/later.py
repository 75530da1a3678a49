"""Fields that clients know from OpenAI and vLLM and that this version cannot honour: refused by name, never ignored.

A value that asks for nothing (null, an empty list, the default) is taken out, so that clients which send every field
still work.
"""

from typing import Any

NOTHING: tuple[Any, ...] = (None, [], {}, False)

_TOOLS = "tool calling is not supported by this version"
_STRUCTURED = "structured output is not supported by this version"

# Field: values that ask for nothing beside null, false and empty; and what to say otherwise.
LATER: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "parallel_tool_calls": ((True,), _TOOLS),
    "functions": ((), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "response_format": (({"type": "text"},), f'{_STRUCTURED}; only {{"type": "text"}} is'),
    "structured_outputs": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "modalities": ((["text"],), "this version answers in text only"),
    "audio": ((), "this version answers in text only"),
    "reasoning_effort": ((), "set it in chat_template_kwargs if the model's chat template knows it"),
    "verbosity": (("medium",), "is not supported by this version"),
    "suffix": (("",), "filling in the middle is not supported by this version"),
    "prediction": ((), "predicted outputs are not supported by this version"),
    "moderation": ((), "this version moderates nothing"),
    "web_search_options": ((), "this version searches no web"),
    "use_beam_search": ((), "beam search is not supported"),
    "documents": ((), "is not supported by this version; put them into a message"),
    "chat_template": ((), "templates in requests are not taken; see the flag --chat-template"),
    "logits_processors": ((), "is not supported by this version"),
}


def take_out_later(content: dict[str, Any]) -> list[str]:
    """Remove such fields from the body; reasons for those that ask for something."""
    reasons = []
    for name in LATER.keys() & content.keys():
        harmless, reason = LATER[name]
        value = content.pop(name)
        if not any(value == nothing and type(value) is type(nothing) for nothing in (*NOTHING, *harmless)):
            reasons.append(f"{name}: {reason}")
    return sorted(reasons)
