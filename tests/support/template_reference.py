"""Conversations, and their rendering by quire and by transformers, which is the reference for chat templates."""

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from quire_engine.errors import InvalidRequest
from quire_engine.text.chat_template import ChatTemplate

NAMED = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
Message = dict[str, Any]

CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [{"role": "user", "content": "  What is a list?\n"}],
    "system": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<b>&\"'</b> é 😀"}],
    "three turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello. "},
        {"role": "user", "content": "And?", "name": "ann"},
    ],
    "tools": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "add",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ],
    "nulls": [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "x", "tool_calls": None},
    ],
    "reasoning by another name": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "x", "reasoning": "y"},
    ],
}


OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "variables": {"enable_thinking": False, "bos_token": "<other>"}},
    {"add_generation_prompt": False, "continue_final_message": True},
]
"""The settings in which each conversation is rendered."""


def reference_tokenizer() -> Any:
    """Return a tokenizer of transformers with the special tokens of NAMED."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), **NAMED)


@lru_cache(maxsize=128)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, NAMED)


def ours(source: str, messages: list[Message], **options: Any) -> str:
    """Return quire's rendering, or "refused"."""
    try:
        return _compiled(source).render(messages, **options)
    except InvalidRequest:
        return "refused"


def theirs(reference: Any, source: str, messages: list[Message], **options: Any) -> str:
    """Return the rendering of transformers, or "refused"."""
    variables = options.pop("variables", {})
    try:
        text: str = reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options, **variables
        )
    except Exception:
        return "refused"
    return text
