"""The chat templates of some 70 real models render as transformers renders them, and show their answer formats.

The templates come from the source distribution of llama-cpp-python (llama.cpp, MIT license, models/templates); each
belongs to the model that its file names.
"""

from typing import Any

import package_sources
import pytest
from template_reference import CONVERSATIONS, OPTIONS, ours, reference_tokenizer, theirs

from quire_engine.api.rendering_worker import Conversation, prompt_text
from quire_engine.errors import InvalidRequest
from quire_engine.text.answers.formats import formats_of
from quire_engine.text.chat_template import ChatTemplate

FORMATS = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": (None, "seed_oss"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
}
"""The formats of tool calls and of reasoning that a template shows, for models whose formats are documented."""


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    folder = package_sources.source("llama-cpp-source.lock", "vendor/llama.cpp/models/") / "vendor/llama.cpp/models"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted((folder / "templates").glob("*.jinja"))}


@pytest.mark.slow
def test_real_templates_render_as_in_transformers(templates: dict[str, str]) -> None:
    reference: Any = reference_tokenizer()
    rendered, different = 0, []
    for name, template in templates.items():
        for conversation, messages in CONVERSATIONS.items():
            for options in OPTIONS:
                expected = theirs(reference, template, messages, **dict(options))
                rendered += expected != "refused"
                if ours(template, messages, **options) != expected:
                    different.append((name, conversation, options))
    assert different == []
    assert len(templates) >= 70 and rendered > 20 * len(templates)


def test_real_templates_show_their_formats(templates: dict[str, str]) -> None:
    found = {name: formats_of(templates[name]) for name in FORMATS}
    names = {
        name: (
            formats.tools.names[0] if formats.tools else None,
            formats.reasoning.names[0] if formats.reasoning else None,
        )
        for name, formats in found.items()
    }
    assert names == FORMATS


def test_real_templates_keep_instructions_anywhere(templates: dict[str, str]) -> None:
    """Some twenty of them, used directly, refuse or omit a system message that is not the first."""
    first, later = {"role": "system", "content": "(one)"}, {"role": "system", "content": "(two)"}
    as_developer = {**later, "role": "developer"}
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    conversations = (
        [first, later, user],
        [first, as_developer, user],
        [first, user, later],
        [first, user, answer, as_developer, user],
    )
    lost = {
        name
        for name, source in templates.items()
        for messages in conversations
        if not _shows_both(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), messages)
    }
    assert lost == WITHOUT_SYSTEM


WITHOUT_SYSTEM = {
    "CohereForAI-c4ai-command-r-plus-tool_use",  # needs tools
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",  # needs a variable
    "google-gemma-2-2b-it",  # refuses every system message
}


def _shows_both(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    try:
        text = prompt_text(template, Conversation(messages=messages))
    except InvalidRequest:
        return False
    return "(one)" in text and "(two)" in text


def test_second_reader_uses_the_unpacked_source_cache(templates: dict[str, str]) -> None:
    """Expect a second reader to find the unpacked folder and to fetch nothing."""
    again = package_sources.source("llama-cpp-source.lock", "nothing of this name/")
    assert (again / "vendor/llama.cpp/models/templates").is_dir()
