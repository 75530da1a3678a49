"""Text parts of models that also see images: native families give transformers' own tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quire_parity.answering import Answering

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions, ServerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.engine import make_engine
from quire_engine.model.loader import find_candidate
from quire_engine.runner import load_model

TEXT = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "Mistral3ForConditionalGeneration": ("mistral3", {"model_type": "mistral"}, {**VISION, "head_dim": 16}),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        {"rope_parameters": MROPE},
        {**QWEN_VISION, "fullatt_block_indexes": [0]},
    ),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl",
        {"rope_parameters": MROPE},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
}


def save(folder: Path, architecture: str) -> Any:
    """Write a random model, and return transformers' own."""
    model_type, text, vision = CASES[architecture]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, text_config={**TEXT, **text}, vision_config=vision)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.15
    model.eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    config = EngineConfig(
        model=ModelOptions(path=folder, dtype="float32"),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
        server=ServerOptions(),
        threads=1,
    )
    running = Answering(make_engine(load_model(config), scheduler=config.scheduler, cache=config.cache))
    for key, prompt in enumerate(prompts):
        running.add(key, prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    running.finish()
    return [list(running.tokens[key]) for key in range(len(prompts))]


PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]


@pytest.mark.parametrize("architecture", CASES)
def test_text_part_gives_the_tokens_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    model = save(tmp_path, architecture)
    assert find_candidate(tmp_path, impl="auto", trust_remote_code=False).is_native
    assert answers(tmp_path, PROMPTS, 8) == [greedy(model, prompt, 8) for prompt in PROMPTS]
