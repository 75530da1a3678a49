"""A draft model next to the target: its proposals, and the configurations that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import FlagsError
from quire_engine.config import SpeculationOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.speculation.step_curve import StepCurve
from quire_engine.core.stall_bound import StepCosts
from quire_engine.errors import ModelFolderError
from quire_engine.model.shape import ModelShape
from quire_engine.runner.draft_start import draft_problems, same_tokens, with_draft_layers

PROMPTS = [list(range(3, 40)), [5, 6, 7], [200, 100, 50, 25] * 5]


def shape(**changes: Any) -> ModelShape:
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "eos_token_ids": (2,),
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "windows": (None, None),
    }
    return ModelShape(**fields | changes)


@pytest.mark.parametrize(
    ("target", "draft", "parts"),
    [
        ({}, {}, []),
        ({}, {"num_layers": 1, "windows": (None,), "head_dim": 8}, []),
        ({}, {"vocab_size": 99}, ["99 tokens in its vocabulary, and the target 100"]),
        ({}, {"max_position_embeddings": 255}, ["255 tokens is shorter than the target's 256: lower"]),
        ({"windows": (None, 64)}, {}, ["the target has windows"]),
        ({}, {"windows": (64, 64)}, ["it has windows"]),
        ({}, {"vocab_size": 1, "max_position_embeddings": 1}, ["vocabulary", "shorter"]),
    ],
)
def test_a_draft_model_must_suit_its_target(target: dict[str, Any], draft: dict[str, Any], parts: list[str]) -> None:
    problems = draft_problems(shape(**target), shape(**draft), longest=256)
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))


def test_the_cache_has_the_layers_of_both() -> None:
    both = with_draft_layers(shape(), shape(num_layers=1, windows=(None,), num_kv_heads=1, head_dim=8))
    assert (both.num_layers, both.kv_groups) == (3, (None,))
    assert [(heads.kv_heads, heads.head_dim) for heads in both.layer_heads] == [(2, 16), (2, 16), (1, 8)]


def test_tokenizers_are_compared_by_their_ids(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c", "none")]
    for folder in folders:
        folder.mkdir()
    for folder, vocabulary in zip(folders, ({"x": 0, "y": 1}, {"y": 1, "x": 0}, {"x": 1, "y": 0}), strict=False):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert same_tokens(folders[0], folders[1]) and not same_tokens(folders[0], folders[2])
    assert same_tokens(folders[0], folders[3])
    (folders[3] / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="is not a tokenizer"):
        same_tokens(folders[0], folders[3])


def eager(running: Any) -> Any:
    """Let drafts seem to cost nothing, so that each sequence has as many as it can."""
    speculation = running.engine._scheduler._speculation
    speculation._curve = StepCurve(StepCosts(fixed=1.0, per_token=1e-9, per_pair=1e-9))
    speculation._seconds_per_pass = 1e-9
    speculation.observe_step = lambda tokens, seconds, **_: None
    return running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_equal_to_its_target_is_always_right(
    make_folder: Callable[..., Path], start: Callable[..., Any], temperature: float
) -> None:
    """It samples with the seed of the target, so that it is right at any temperature."""
    folder = make_folder()
    options = SpeculationOptions(method="draft_model", model=folder, max_tokens=3)
    params = SamplingParams(max_tokens=33, temperature=temperature, ignore_eos=True)
    plain, drafting = start(folder), eager(start(folder, speculation=options))
    for running in (plain, drafting):
        for key, prompt in enumerate(PROMPTS):
            running.add(key, prompt, params, seed=key)
        running.finish()
    assert drafting.tokens == plain.tokens
    counters = drafting.engine.counters
    assert counters.accepted_tokens == counters.draft_tokens > 0
    assert counters.steps == 1 + 32 // 4


def test_another_draft_model_changes_no_answer(make_folder: Callable[..., Path], start: Callable[..., Any]) -> None:
    folder, other = make_folder(), make_folder(num_hidden_layers=1, hidden_size=32, head_dim=8)
    options = SpeculationOptions(method="draft_model", model=other, max_tokens=5)
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    plain, drafting = start(folder), eager(start(folder, speculation=options))
    for running in (plain, drafting):
        for key, prompt in enumerate(PROMPTS):
            running.add(key, prompt, params, seed=key)
        running.finish()
    assert drafting.tokens == plain.tokens
    assert drafting.engine.counters.draft_tokens > drafting.engine.counters.accepted_tokens


def test_an_unsuitable_draft_model_stops_the_start_if_required(
    make_folder: Callable[..., Path], start: Callable[..., Any]
) -> None:
    other = make_folder(vocab_size=300)
    with pytest.raises(FlagsError) as caught:
        start(make_folder(), speculation=SpeculationOptions(method="draft_model", model=other))
    assert "has 300 tokens in its vocabulary, and the target 250" in caught.value.problems[0]
    assert "--no-spec-required" in caught.value.problems[0]


@pytest.mark.parametrize("broken", ["vocabulary", "folder", "weights"])
def test_a_broken_draft_model_that_is_not_required_leaves_the_target(
    make_folder: Callable[..., Path], start: Callable[..., Any], tmp_path: Path, broken: str
) -> None:
    draft = tmp_path / "draft"
    if broken == "vocabulary":
        draft = make_folder(vocab_size=300)
    elif broken == "weights":
        shutil.copytree(make_folder(), draft)
        (draft / "model.safetensors").write_bytes(b"not weights")
    options = SpeculationOptions(method="draft_model", model=draft, required=False)
    running = start(make_folder(), speculation=options)
    running.add(1, [3, 4, 5], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    running.finish()
    assert len(running.tokens[1]) == 9 and running.engine.counters.num_drafts == 0
