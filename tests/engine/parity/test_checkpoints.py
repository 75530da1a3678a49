"""The same tokens as transformers from each layout of a checkpoint, and the end tokens that its folder defines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_parity.cases import Case, prompts, save
from quire_parity.engines import config_of, follow, start
from quire_parity.native import YARN
from quire_parity.schedules import SCHEDULES, Schedule

from quire_engine.config import CacheOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.model.linear import LinearBackend, OneDnnLinearBackend, TorchLinearBackend
from quire_engine.runner import arithmetic, load_model

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
}
FUSED = {"save_original_format": False}
CASES = {
    "in several files": Case(family="llama", saved={"max_shard_size": "60KB"}),
    "in bfloat16": Case(family="qwen2", fields={"dtype": "bfloat16", "tie_word_embeddings": True}),
    "in float16, several files": Case(family="mistral", fields={"dtype": "float16"}, saved={"max_shard_size": "60KB"}),
    "mixtral, one tensor for all experts": Case(family="mixtral", fields=EXPERTS, saved=FUSED),
    "qwen3_moe, each expert by itself, several files": Case(
        family="qwen3_moe", fields=QWEN_EXPERTS, saved={"max_shard_size": "60KB"}
    ),
    "qwen3_moe, one tensor for all experts, several files": Case(
        family="qwen3_moe", fields=QWEN_EXPERTS, saved={**FUSED, "max_shard_size": "60KB"}
    ),
}

OLD_ROPE = {"rope_parameters": None, "rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
FORMS = {
    "llama, tied by config.json, own LM head": Case(family="llama", config={"tie_word_embeddings": True}),
    "gpt2, tied by config.json, own LM head": Case(
        family="gpt2", fields={"num_key_value_heads": None}, config={"tie_word_embeddings": True}
    ),
    "mistral, rotation of transformers 4": Case(
        family="mistral",
        fields={"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        config=OLD_ROPE,
    ),
    "qwen3, rotations of both versions": Case(family="qwen3", config={**OLD_ROPE, "rope_parameters": YARN}),
}


@pytest.mark.parametrize("name", FORMS)
def test_config_of_another_version_gives_the_same_tokens(name: str, parity: Any) -> None:
    parity.check(FORMS[name], SCHEDULES["prefix hits"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_files_without_an_index_give_the_same_tokens(family: str, parity: Any, tmp_path: Path) -> None:
    ready = parity.prepare(Case(family=family, fields={"num_key_value_heads": None}, saved={"max_shard_size": "60KB"}))
    shutil.copytree(ready.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").unlink()
    config = config_of(
        tmp_path,
        max_model_len=96,
        scheduler=SchedulerOptions(max_num_seqs=9),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
    )
    rounds, _ = follow(start(config), ready.prompts, SCHEDULES["alone"])
    assert [heard.token_ids for heard in rounds[0]] == [answer.token_ids for answer in ready.answers]


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers(name: str, parity: Any) -> None:
    case = CASES[name]
    parity.check(case, SCHEDULES["a full batch"])
    folder = parity.prepare(case).folder
    several = len(list(folder.glob("*.safetensors"))) > 1
    assert several == (folder / "model.safetensors.index.json").exists() == ("several" in name)


def test_both_expert_layouts_are_covered(parity: Any) -> None:
    def names(case: str) -> str:
        folder: Path = parity.prepare(CASES[case]).folder
        return (folder / "model.safetensors.index.json").read_text()

    assert "experts.gate_up_proj" in names("qwen3_moe, one tensor for all experts, several files")
    assert "experts.5.gate_proj.weight" in names("qwen3_moe, each expert by itself, several files")


def test_block_size_does_not_change_stored_keys(parity: Any) -> None:
    large = Schedule(
        scheduler=SchedulerOptions(max_num_seqs=5, max_num_batched_tokens=24),
        block_size=64,
        forced=lambda seen: seen.partial_steps > 0,
    )
    parity.check(CASES["in several files"], large)


def test_any_of_several_tokens_ends_a_sequence(tmp_path: Path, parity: Any) -> None:
    """generation_config.json names two: the reference's fourth token, and one that it never samples."""
    case = CASES["in several files"]
    answer = parity.prepare(case).answers[-1].token_ids
    place = next(i for i in range(3, len(answer)) if answer[i] not in answer[:i])
    never = next(token for token in range(250) if token not in answer)
    save(case, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [never, answer[place]]}))
    config = config_of(
        tmp_path,
        max_model_len=case.max_model_len,
        scheduler=SchedulerOptions(max_num_seqs=4),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
    )
    model = load_model(config)
    assert model.traits.eos_token_ids == (never, answer[place])
    engine = make_engine(model, scheduler=config.scheduler)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    assert engine.add(Request(key=1, prompt_token_ids=prompts(case.lengths)[-1], params=params, seed=0)) is None
    drawn: list[int] = []
    reasons = []
    while engine.has_work:
        step = engine.step()
        assert step is not None
        drawn += step.token_ids
        reasons += [end.reason for end in step.finished]
    assert drawn == answer[: place + 1] and reasons == ["stop"]


def test_tied_embeddings_count_once_per_copy(parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed LM head is a second copy in addition to the embedding table."""

    def held(backend: LinearBackend) -> int:
        monkeypatch.setattr(arithmetic, "candidates", lambda dtype, **_: (backend,))
        case = CASES["in bfloat16"]
        config = config_of(
            parity.prepare(case).folder,
            max_model_len=case.max_model_len,
            scheduler=SchedulerOptions(max_num_seqs=1),
            cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
            dtype="float32",
        )
        return load_model(config).model_bytes

    embedding = 250 * 64 * 4
    assert held(OneDnnLinearBackend(torch.float32)) == held(TorchLinearBackend(torch.float32)) + embedding


def test_near_ties_are_rare(parity: Any) -> None:
    assert parity.tally.compared > 100
    assert parity.tally.near_ties <= 0.005 * parity.tally.compared, parity.tally
