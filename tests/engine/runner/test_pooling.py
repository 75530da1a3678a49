"""Pooled hidden states through a whole engine equal those of transformers, however the prompt was computed."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_common.errors import FlagsError
from quire_engine.config import PoolingSetup, SpeculationOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import Pooling, SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.model.loader import find_native_candidate

PROMPTS = [list(range(3, 70)), [5, 9, 200], list(range(100, 149)), list(range(3, 70))]
EMBED = PoolingSetup(hidden_size=64)
SCORE = PoolingSetup(hidden_size=64, task="score", yes_token=7, no_token=9)
LAST, MEAN = Pooling(), Pooling(mean=True)
Start = Callable[..., Any]


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def states(make_folder: Callable[..., Path], family: str) -> list[torch.Tensor]:
    """Return for each prompt the hidden states [P, H] after the last norm."""
    from transformers import AutoModel

    factory: Any = AutoModel
    model = factory.from_pretrained(make_folder(family), dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def read(running: Any, prompts: list[list[int]], pooling: Pooling) -> list[torch.Tensor]:
    """Return the sums of what is pooled of each prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)
    sums: dict[int, torch.Tensor] = {}
    for key, prompt in enumerate(prompts):
        assert running.engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0)) is None
    while running.engine.has_work:
        step = running.engine.step()
        running.engine.check_integrity()
        for part in step.pooled:
            values = torch.tensor(array("f", part.values))
            sums[part.key] = sums[part.key] + values if part.key in sums else values
    return [sums[key] for key in range(len(prompts))]


@pytest.mark.parametrize("budget", [16, 40, 256])
def test_hidden_states_equal_transformers(
    budget: int, family: str, make_folder: Callable[..., Path], start: Start, states: list[torch.Tensor]
) -> None:
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=budget)
    running = start(make_folder(family), scheduler=scheduler, pooling=EMBED)
    for pooling in (LAST, MEAN, LAST):
        expected = [of[-1] if pooling is LAST else of.sum(dim=0) for of in states]
        for own, theirs in zip(read(running, PROMPTS, pooling), expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-3, rtol=1e-4)
    assert running.engine.counters.prefix_cache_hits > 0


def test_few_blocks_do_not_change_the_vectors(make_folder: Callable[..., Path], start: Start) -> None:
    folder = make_folder("qwen3")
    ample = read(start(folder, pooling=EMBED), PROMPTS, MEAN)
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16)
    scarce = start(folder, kv_cache_memory_bytes=7 * 65536, max_model_len=96, scheduler=scheduler, pooling=EMBED)
    for own, other in zip(read(scarce, PROMPTS, MEAN), ample, strict=True):
        torch.testing.assert_close(own, other, atol=2e-3, rtol=1e-4)


def test_scores_are_logits_of_the_last_token(
    family: str, make_folder: Callable[..., Path], start: Start, states: list[torch.Tensor]
) -> None:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(make_folder(family), dtype=torch.float32)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0, -1, [7, 9]] for prompt in PROMPTS]
    running = start(make_folder(family), pooling=SCORE)
    for own, theirs in zip(read(running, PROMPTS, Pooling(token_ids=(7, 9))), expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-3, rtol=1e-4)


def headless(whole: Path, folder: Path, architecture: str) -> Path:
    """Save a checkpoint as embedding models are saved: without an LM head, and names without their prefix."""
    import json

    folder.mkdir()
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    tensors = load_file(whole / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in tensors.items() if not name.startswith("lm_head.")}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_checkpoints_without_an_lm_head_are_read(
    architecture: str, make_folder: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    whole = make_folder("qwen3")
    expected = read(start(whole, pooling=EMBED), PROMPTS[1:2], LAST)
    bare = headless(whole, tmp_path / "bare", architecture)
    (own,) = read(start(bare, pooling=EMBED), PROMPTS[1:2], LAST)
    torch.testing.assert_close(own, expected[0], atol=0, rtol=0)


def test_embeddings_need_no_memory_for_the_lm_head(make_folder: Callable[..., Path], start: Start) -> None:
    folder = make_folder("qwen3")
    sizes = [start(folder, pooling=setup).model.model_bytes for setup in (EMBED, SCORE)]
    assert sizes[0] < sizes[1]


def test_a_classifier_is_a_decoder_if_its_head_is_of_tokens(make_folder: Callable[..., Path]) -> None:
    from quire_engine.errors import ModelFolderError
    from quire_engine.model_folder import ConfigOverrides

    classifier = {"architectures": ["Qwen3ForSequenceClassification"]}
    tokens = {**classifier, "classifier_from_token": ["no", "yes"]}
    folder = make_folder("qwen3")
    assert find_native_candidate(folder, ConfigOverrides(config=tokens)).shape.architecture == "Qwen3ForCausalLM"
    with pytest.raises(ModelFolderError, match="Qwen3ForSequenceClassification"):
        find_native_candidate(folder, ConfigOverrides(config=classifier))


def test_bidirectional_models_are_refused(make_folder: Callable[..., Path]) -> None:
    from quire_engine.errors import ModelFolderError
    from quire_engine.model_folder import ConfigOverrides

    with pytest.raises(ModelFolderError, match="is_causal"):
        find_native_candidate(make_folder("qwen3"), ConfigOverrides(config={"is_causal": False}))


def test_models_of_transformers_are_refused(
    make_folder: Callable[..., Path], engine_config: Callable[..., Any]
) -> None:
    from quire_engine.runner import load_model

    config = engine_config(make_folder("qwen3"), pooling=EMBED, model_impl="transformers")
    with pytest.raises(FlagsError, match="--runner generate"):
        load_model(replace(config))


def test_speculation_is_refused(make_folder: Callable[..., Path], engine_config: Callable[..., Any]) -> None:
    from quire_engine.runner import load_model

    config = engine_config(make_folder("qwen3"), pooling=EMBED)
    with pytest.raises(FlagsError, match="--speculative-config are for engines that generate"):
        load_model(replace(config, speculation=SpeculationOptions()))
