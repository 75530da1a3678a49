"""Which architectures have a native family: the name in config.json's ``architectures``, and the module that builds it.

Only the module of the one that is wanted is loaded.
"""

import importlib

from quire_engine.model.family import Family

_MODULES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

SUPPORTED = tuple(sorted(_MODULES))


def find_family(architecture: str) -> Family:
    """The family of a supported architecture."""
    family: Family = importlib.import_module(f"quire_engine.model.{_MODULES[architecture]}").FAMILY
    return family
