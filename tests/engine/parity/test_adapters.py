"""A model with an adapter answers as the model with the adapter merged, for every family and every linear layer."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from adapter_support.engines import answers, started
from adapter_support.folders import linear_shapes, make_adapter, merge, of_kinds
from quire_parity import cases
from quire_parity.cases import Case
from quire_parity.reference import Answer, Tally, compare, generate, load_reference

LENGTHS = (1, 17, 40)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = Case(family="llama", fields={"attention_bias": True, "mlp_bias": True}, lengths=LENGTHS)
FAMILIES = {
    "llama": (LLAMA, ALL),
    "mistral": (Case(family="mistral", fields={"sliding_window": 24}, lengths=LENGTHS), ALL),
    "qwen2": (Case(family="qwen2", lengths=LENGTHS), ALL),
    "qwen3": (Case(family="qwen3", fields={"head_dim": 24}, lengths=LENGTHS), ALL),
    "gemma3": (
        Case(family="gemma3_text", fields={"head_dim": 24, "query_pre_attn_scalar": 40}, lengths=LENGTHS),
        ALL,
    ),
    "phi3": (Case(family="phi3", lengths=LENGTHS), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "qwen3_moe": (
        Case(
            family="qwen3_moe",
            fields={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
            lengths=LENGTHS,
        ),
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
}


def references(folder: Path, prompts: Sequence[list[int]]) -> list[Answer]:
    model = load_reference(folder, "eager")
    return [generate(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_its_merged_model(family: str, tmp_path: Path) -> None:
    case, kinds = FAMILIES[family]
    cases.save(case, tmp_path / "base")
    shapes = of_kinds(linear_shapes(tmp_path / "base"), kinds)
    assert {module.rsplit(".", 1)[-1] for module in shapes} == set(kinds)
    adapter = make_adapter(tmp_path / "adapter", shapes)
    merge(tmp_path / "base", adapter, tmp_path / "merged")
    prompts = cases.prompts(LENGTHS)
    adapted, base = references(tmp_path / "merged", prompts), references(tmp_path / "base", prompts)
    assert [answer.token_ids for answer in adapted] != [answer.token_ids for answer in base]
    engine = started(tmp_path / "base", adapters=[adapter])
    asked = {key: (prompts[key // 2], 1 if key % 2 else None) for key in range(2 * len(prompts))}
    heard = answers(engine, asked)
    engine.close()
    tally = Tally()
    for key, one in heard.items():
        expected = (adapted if key % 2 else base)[key // 2]
        compare(expected, one.token_ids, one.logprobs, tally, f"{family}, request {key}")


@pytest.mark.parametrize("kind", ALL)
def test_every_linear_layer_equals_the_merged_model(kind: str, tmp_path: Path) -> None:
    cases.save(LLAMA, tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", of_kinds(linear_shapes(tmp_path / "base"), [kind]), std=0.3)
    merge(tmp_path / "base", adapter, tmp_path / "merged")
    prompts = cases.prompts(LENGTHS)
    engine = started(tmp_path / "base", adapters=[adapter])
    heard = answers(engine, {key: (prompt, 1) for key, prompt in enumerate(prompts)})
    engine.close()
    for expected, one in zip(references(tmp_path / "merged", prompts), heard.values(), strict=True):
        compare(expected, one.token_ids, one.logprobs, Tally(), kind)


def test_patterns_of_ranks_and_scales_are_applied(tmp_path: Path) -> None:
    cases.save(LLAMA, tmp_path / "base")
    shapes = linear_shapes(tmp_path / "base")
    shapes = of_kinds(shapes, ALL)
    down, first = of_kinds(shapes, ["down_proj"]), "model.layers.0.self_attn.q_proj"
    adapter = make_adapter(
        tmp_path / "adapter",
        shapes,
        ranks=dict.fromkeys(down, 9) | {first: 2},
        rank_pattern={"down_proj": 9, r"layers\.0\.self_attn\.q_proj": 2},
        alpha_pattern={"down_proj": 3.0},
        use_rslora=True,
    )
    scales = dict.fromkeys(down, 3.0 / math.sqrt(9)) | {first: 8.0 / math.sqrt(2)}
    merge(tmp_path / "base", adapter, tmp_path / "merged", scales)
    prompts = cases.prompts(LENGTHS)
    engine = started(tmp_path / "base", adapters=[adapter])
    heard = answers(engine, {key: (prompt, 1) for key, prompt in enumerate(prompts)})
    engine.close()
    for expected, one in zip(references(tmp_path / "merged", prompts), heard.values(), strict=True):
        compare(expected, one.token_ids, one.logprobs, Tally(), "patterns")


def test_a_mixed_batch_has_the_bits_of_each_alone(tmp_path: Path) -> None:
    """In deterministic mode, eight adapters and the base in one batch change no bit of each other."""
    cases.save(LLAMA, tmp_path / "base")
    shapes = of_kinds(linear_shapes(tmp_path / "base"), ALL)
    adapters = [make_adapter(tmp_path / f"{seed}", shapes, seed=seed, rank=2 + 2 * (seed % 3)) for seed in range(8)]
    prompts = cases.prompts(LENGTHS)
    asked = {key: (prompts[key % len(prompts)], key % 9 or None) for key in range(18)}
    engine = started(tmp_path / "base", slots=4, adapters=adapters, deterministic=True)
    together = answers(engine, asked)
    for key, one in asked.items():
        assert answers(engine, {key: one}) == {key: together[key]}
    engine.close()
