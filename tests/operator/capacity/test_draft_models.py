"""The draft model in the capacity arithmetic: its weights, its part of the cache, and what is known against it."""

from dataclasses import replace
from typing import Any

import pytest
from model_configs import facts_of
from specs import valid_spec

from quire_cli.errors import CapacityProblem
from quire_cli.local.machine import Machine
from quire_cli.local.plan import Share, size
from quire_common.model_memory import ModelFacts
from quire_operator.api import HubSource, Spec
from quire_operator.capacity import fit as capacity
from quire_operator.capacity.fit import Fits, TooSmall, draft_problems, remedies
from quire_operator.capacity.judge import draft_hub_source, judge, replica_memory

GIB = 2**30
TARGET = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DRAFT = {**TARGET, "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8, "num_key_value_heads": 4}


def spec_of(*, required: bool = True, memory: str = "24Gi", draft: dict[str, Any] | None = None, **more: Any) -> Spec:
    speculation = {"method": "DraftModel", "draft": draft or {"source": "hf://a/small"}, "required": required}
    return valid_spec(
        model={"source": "hf://a/b"},
        engine={"speculation": speculation, "maxModelLength": 4096},
        resources={"limits": {"memory": memory}},
        **more,
    )


def measured(draft: ModelFacts | None, spec: Spec | None = None) -> Any:
    spec = spec_of() if spec is None else spec
    return capacity.measure(spec, facts_of(TARGET), device="cpu", cpu_multiplies_bfloat16=True, draft=draft)


def test_weights_and_layers_of_the_draft_are_counted() -> None:
    draft = facts_of(DRAFT)
    (both, _), (alone, _) = measured(draft), measured(None)
    assert both.draft_bytes == draft.parameters * 2
    assert both.base_bytes - alone.base_bytes == both.draft_bytes
    # Keys and values of 8 layers with 4 KV heads of 128, in 2 bytes.
    assert both.kv_bytes_per_token - alone.kv_bytes_per_token == 2 * 8 * 4 * 128 * 2
    assert len(both.kv_groups) == 1, "in the same group"
    assert both.without_draft == alone and alone.without_draft is None


def test_int8_counts_for_both_models() -> None:
    draft = facts_of(DRAFT)
    spec = spec_of()
    spec = replace(spec, engine=replace(spec.engine, extra_args=("--quantization", "int8")))
    needs, _ = measured(draft, spec)
    assert draft.parameters < needs.draft_bytes < 2 * draft.parameters


def test_a_draft_that_does_not_fit_is_named_among_the_remedies() -> None:
    spec, draft = spec_of(), facts_of(DRAFT)
    needs, asked = measured(draft)
    assert needs.without_draft is not None
    alone = capacity.fit(spec, needs.without_draft, asked, memory_bytes=2**60)
    assert isinstance(alone, Fits)
    least = next(
        size_bytes
        for size_bytes in range(15 * GIB, 64 * GIB, GIB // 8)
        if isinstance(capacity.fit(spec, needs.without_draft, asked, memory_bytes=size_bytes), Fits)
    )
    small = capacity.fit(spec, needs, asked, memory_bytes=least)
    assert isinstance(small, TooSmall) and small.fits_without_draft
    assert any(
        "remove spec.engine.speculation" in advice for advice in remedies(spec, needs, asked, small, shared=False)
    )
    smaller = capacity.fit(spec, needs, asked, memory_bytes=GIB)
    assert isinstance(smaller, TooSmall) and not smaller.fits_without_draft
    spec_at_least = spec_of(memory=str(least))
    memory = replica_memory(spec_at_least, None)
    assert memory is not None
    blocked = judge(spec_at_least, facts_of(TARGET), memory, draft=draft)
    assert blocked is not None and "draft model" in blocked.message
    assert judge(spec_at_least, facts_of(TARGET), memory) is None, "an unknown draft blocks nothing"
    optional = spec_of(memory=str(least), required=False)
    assert judge(optional, facts_of(TARGET), memory, draft=draft) is None, "the engine leaves it out"


@pytest.mark.parametrize(
    ("target", "draft", "parts"),
    [
        ({}, {}, []),
        ({}, {"vocab_size": 32000}, ["its vocabulary has 32,000 tokens"]),
        ({}, {"max_position_embeddings": 2048}, ["it supports 2,048 tokens, and the model 4,096"]),
        ({}, {"max_position_embeddings": 4096}, []),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, {}, ["sliding windows"]),
    ],
)
def test_unsuitable_draft_configurations_are_reported(
    target: dict[str, Any], draft: dict[str, Any], parts: list[str]
) -> None:
    problems = draft_problems(spec_of(), facts_of(TARGET, **target).config, facts_of(DRAFT, **draft).config)
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))


def sized(spec: Spec, draft: ModelFacts, memory_bytes: int, tmp_path: Any) -> Any:
    machine = Machine(cpus=1, memory_bytes=memory_bytes, gpu_memory_bytes=(), multiplies_bfloat16=True)
    share = Share(memory_bytes=memory_bytes, threads=1)
    asked = (tmp_path / "draft", draft)
    return size(spec, facts_of(TARGET), folder=tmp_path, share=share, machine=machine, draft=asked)


def test_quire_up_refuses_an_unsuitable_draft_only_if_required(tmp_path: Any) -> None:
    other = facts_of(DRAFT, vocab_size=32000)
    with pytest.raises(CapacityProblem) as caught:
        sized(spec_of(), other, 64 * GIB, tmp_path)
    assert "spec.engine.speculation.draft.source" in caught.value.message
    assert sized(spec_of(required=False), other, 64 * GIB, tmp_path).draft_folder is not None, "the engine says why"


def test_quire_up_leaves_out_an_optional_draft_that_does_not_fit(tmp_path: Any) -> None:
    large = facts_of(TARGET)
    assert sized(spec_of(), large, 64 * GIB, tmp_path).draft_folder == tmp_path / "draft"
    with pytest.raises(CapacityProblem):
        sized(spec_of(), large, 24 * GIB, tmp_path)
    assert sized(spec_of(required=False), large, 24 * GIB, tmp_path).draft_folder is None


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ({"source": "hf://a/s@v1"}, HubSource(repository="a/s", revision="v1")),
        ({"source": "s3://bucket/s"}, None),
        ({"source": "hf://a/s", "credentials": {"secretName": "hub"}}, None),
    ],
)
def test_only_public_drafts_are_looked_up(draft: dict[str, Any], expected: HubSource | None) -> None:
    assert draft_hub_source(spec_of(draft=draft)) == expected
