"""A draft model next to the target: its proposals, and the configurations that are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_support.folders import linear_shapes, make_adapter, of_kinds
from fixed_drafts import use_every_draft
from quire_parity.answering import Answering
from quire_parity.shapes import shape
from safetensors.torch import save_file

from quire_common.errors import FlagsError
from quire_engine.config import AdapterOptions, SpeculationOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.engine import make_engine
from quire_engine.errors import ModelFolderError
from quire_engine.model.layers import DecoderStack
from quire_engine.runner import load_model
from quire_engine.runner.draft_start import draft_problems, same_tokens, with_draft_layers

TARGET = {"vocab_size": 100, "max_position_embeddings": 512}
PROMPTS = [list(range(3, 40)), [5, 6, 7], [200, 100, 50, 25] * 5]


@pytest.mark.parametrize(
    ("target", "draft", "parts"),
    [
        ({}, {}, []),
        ({}, {"num_layers": 1, "head_dim": 8}, []),
        ({}, {"vocab_size": 99}, ["its vocabulary has 99 tokens, and the model's 100"]),
        (
            {},
            {"max_position_embeddings": 255},
            ["and the model 256: set --max-model-len to 255 or less"],
        ),
        ({"windows": (None, 64)}, {}, ["sliding windows"]),
        ({}, {"windows": (64, 64)}, ["sliding windows"]),
        ({}, {"vocab_size": 1, "max_position_embeddings": 1}, ["vocabulary", "supports"]),
    ],
)
def test_a_draft_model_must_suit_its_target(target: dict[str, Any], draft: dict[str, Any], parts: list[str]) -> None:
    problems = draft_problems(shape(**TARGET | target), shape(**TARGET | draft), longest=256)
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))


def test_the_cache_has_the_layers_of_both() -> None:
    both = with_draft_layers(shape(head_dim=16), shape(num_layers=1, num_kv_heads=1, head_dim=8))
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
    use_every_draft(running.engine._scheduler._speculation)
    return running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_an_identical_model_are_always_accepted(
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


def test_greedy_passes_of_a_recorded_draft_model_are_one_call(
    make_folder: Callable[..., Path], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end at different lengths, so that some have fewer drafts than others."""
    folder = make_folder()
    options = SpeculationOptions(method="draft_model", model=folder, max_tokens=5)
    drafting = eager(start(folder, speculation=options, quantization="int8"))
    guess, passes = DecoderStack.guess, []

    def counted(self: Any, inputs: Any, slots: Any, caches: Any) -> Any:
        found = guess(self, inputs, slots, caches)
        passes.append(found.shape)
        return found

    monkeypatch.setattr(DecoderStack, "guess", counted)
    for key, prompt in enumerate(PROMPTS):
        drafting.add(key, prompt, SamplingParams(max_tokens=20 + 3 * key, temperature=0.0, ignore_eos=True))
    drafting.finish()
    counters = drafting.engine.counters
    assert counters.accepted_tokens == counters.draft_tokens > 0
    assert (4, 3) in passes and len(set(passes)) > 2


@pytest.mark.parametrize("speculates", [False, True])
def test_steps_are_recorded_at_the_start_if_they_may_have_drafts(
    make_folder: Callable[..., Path], start: Callable[..., Any], speculates: bool
) -> None:
    """Other steps say that they are the first of their size."""
    options = SpeculationOptions(method="ngram", max_tokens=3) if speculates else None
    running = start(make_folder(), quantization="int8", speculation=options)
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    runner = running.model.runner
    execute, found = runner.execute, []

    def noted(batch: Any) -> Any:
        computed = execute(batch)
        found.append((batch.num_tokens, computed.is_first))
        return computed

    runner.execute = noted
    running.finish()
    assert found[:3] == [(60, True), (3, not speculates), (3, False)]


def test_draft_model_catches_up_on_tokens_decoded_during_a_pause(
    make_folder: Callable[..., Path], start: Callable[..., Any]
) -> None:
    """It notes the tokens of steps without drafts, so that it is as right after them as before."""
    folder = make_folder()
    options = SpeculationOptions(method="draft_model", model=folder, max_tokens=3)
    running = eager(start(folder, speculation=options))
    policy = running.engine._scheduler._speculation._policy
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True))
    for number in range(60):
        pays = number < 4 or number > 40
        policy.pauses = not pays
        running.step()
        drafter = running.model.runner.drafter
        assert (len(drafter._rows._noted) > 1) == (not pays and number > 4)
    running.finish()
    counters = running.engine.counters
    assert counters.undrafted_sequences["cost"] >= 3 * 37
    assert counters.accepted_tokens == counters.draft_tokens > 0


def test_different_draft_model_does_not_change_the_output(
    make_folder: Callable[..., Path], start: Callable[..., Any]
) -> None:
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
    assert "its vocabulary has 300 tokens, and the model's 250" in caught.value.problems[0]
    assert "--no-spec-required" in caught.value.problems[0]


def test_error_for_missing_draft_model_names_its_own_flag(
    make_folder: Callable[..., Path], start: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(FlagsError) as caught:
        start(make_folder(), speculation=SpeculationOptions(method="draft_model", model=tmp_path / "missing"))
    (problem,) = caught.value.problems
    assert problem.startswith("--spec-model ") and "is not a folder" in problem and "--model takes" not in problem


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE head"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "eagle"}, "an EAGLE head"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "an EAGLE-3 head"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "an EAGLE-3 head"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "an EAGLE-3 head"),
        ({"medusa_num_heads": 5, "model_type": "medusa"}, "Medusa heads"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "an MLP speculator"),
        (
            {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"},
            "layers for multi-token prediction (MTP)",
        ),
    ],
)
def test_draft_heads_are_refused_by_name(
    make_folder: Callable[..., Path], start: Callable[..., Any], tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
    with pytest.raises(FlagsError) as caught:
        start(make_folder(), speculation=SpeculationOptions(method="draft_model", model=tmp_path))
    (problem,) = caught.value.problems
    assert f"{kind}, not a smaller model" in problem


@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle_heads_are_known_by_their_weights(
    make_folder: Callable[..., Path], start: Callable[..., Any], tmp_path: Path, prefix: str
) -> None:
    """The first published heads have the config.json of a Llama model of one layer."""
    head = tmp_path / "head"
    shutil.copytree(make_folder(num_hidden_layers=1), head)
    save_file({f"{prefix}fc.weight": torch.zeros(64, 128)}, head / "model.safetensors")
    with pytest.raises(FlagsError) as caught:
        start(make_folder(), speculation=SpeculationOptions(method="draft_model", model=head))
    assert "it is an EAGLE head, not a smaller model" in caught.value.problems[0]


@pytest.mark.parametrize("broken", ["vocabulary", "folder", "weights"])
def test_target_starts_without_a_broken_optional_draft_model(
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


def test_target_starts_alone_if_an_optional_draft_does_not_fit(
    make_folder: Callable[..., Path], start: Callable[..., Any]
) -> None:
    """The cache has room for one sequence of the target's layers only."""
    target, draft = make_folder(), make_folder(num_hidden_layers=3)
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 64 * 2 * 2 * 2 * 16 * 4}
    required = SpeculationOptions(method="draft_model", model=draft)
    with pytest.raises(FlagsError, match="too small for one sequence of 64 tokens"):
        start(target, speculation=required, **options)
    running = start(target, speculation=replace(required, required=False), **options)
    running.add(1, [3, 4, 5], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    running.finish()
    assert len(running.tokens[1]) == 9 and running.engine.counters.num_drafts == 0


def test_a_draft_model_serves_sequences_with_adapters(
    make_folder: Callable[..., Path], engine_config: Callable[..., Any], tmp_path: Path
) -> None:
    """The draft model has no adapters, so that it is right less often; the answers are those without it."""
    folder = make_folder()
    shapes = of_kinds(linear_shapes(folder), ("q_proj", "v_proj", "down_proj"))
    adapters = [make_adapter(tmp_path / str(seed), shapes, seed=seed, rank=4, std=0.3) for seed in (1, 2)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    answers = []
    for speculation in (None, SpeculationOptions(method="draft_model", model=folder, max_tokens=4)):
        config = engine_config(folder, deterministic=True, speculation=speculation, kv_cache_memory_bytes=2**21)
        options = AdapterOptions(enabled=True, max_loras=2, max_lora_rank=8, max_cpu_loras=4)
        model = load_model(replace(config, adapters=options))
        engine = make_engine(model, scheduler=config.scheduler, speculation=speculation)
        running = Answering(engine) if speculation is None else eager(Answering(engine))
        for number, adapter in enumerate(adapters, start=1):
            engine.load_adapter(number, str(adapter))
        for key in range(9):
            running.add(key, PROMPTS[key % 3], params, adapter=key // 3 or None)
        while engine.has_work or engine.gauges().num_waiting:
            engine.add_prepared()
            running.step()
        answers.append(running.tokens)
        counters = engine.counters
        engine.close()
    plain, drafting = answers
    assert drafting == plain
    assert len({tuple(plain[key]) for key in (0, 3, 6)}) == 3, "the base and both adapters answer differently"
    assert 0 < counters.accepted_tokens < counters.draft_tokens
