"""Rotary frequencies and tables compared with those of transformers for the same config.json."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from quire_engine.model.rope import LongRopeScaling, RopeConfig, YarnScaling, parse_rope, rotation_problems
from quire_engine.model.rope_frequencies import rotation
from quire_kernels.store_kv import rotary_table

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(24)],
    "long_factor": [1.0 + 1.5 * i for i in range(24)],
}


def parsed(raw: dict[str, Any]) -> RopeConfig:
    problems: list[str] = []
    rope = parse_rope(raw, problems)
    assert not problems
    return rope


def check(rope: RopeConfig, rotary_dim: int, longest: int, theirs: Any) -> None:
    """Compare frequencies, and the table where the float32 angles of transformers are accurate enough."""
    found = rotation(rope, rotary_dim, longest)
    torch.testing.assert_close(torch.tensor(found.frequencies), theirs.inv_freq, rtol=1e-6, atol=0.0)
    assert math.isclose(found.magnitude, theirs.attention_scaling, rel_tol=1e-9)
    positions = torch.arange(4)
    cos, sin = theirs(torch.zeros(1), positions.unsqueeze(0))
    table = rotary_table(torch.tensor(found.frequencies, dtype=torch.float64), 4, found.magnitude)
    half = rotary_dim // 2
    torch.testing.assert_close(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        LLAMA3,
        YARN,
        {**YARN, "factor": None, "original_max_position_embeddings": 16384},
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "rope_theta": 10_000.0},
        {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.5},
        {**YARN, "mscale": 0.707},
        {**YARN, "attention_factor": 1.5},
        # So short that the ramp starts and ends at one component.
        {**YARN, "original_max_position_embeddings": 6},
    ],
    ids=str,
)
def test_rotations_equal_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=65536, rope_parameters=parameters
    )
    check(parsed(config.to_dict()), 128, 65536, LlamaRotaryEmbedding(config))


@pytest.mark.parametrize("longest", [4096, 4097])
@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.25}, {"factor": 8.0}], ids=str)
def test_longrope_factors_depend_on_the_longest_sequence(changes: dict[str, Any], longest: int) -> None:
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={**LONGROPE, **changes, "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    )
    theirs = Phi3RotaryEmbedding(config)
    theirs(torch.zeros(1), torch.tensor([[longest - 1]]))
    rope = parsed(config.to_dict())
    found = rotation(rope, 48, longest)
    torch.testing.assert_close(torch.tensor(found.frequencies), theirs.inv_freq, rtol=1e-6, atol=0.0)
    assert math.isclose(found.magnitude, theirs.attention_scaling, rel_tol=1e-9)
    if longest <= 4096:
        check(rope, 48, longest, theirs)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_old_longrope_name_of_phi3_is_accepted(name: str) -> None:
    raw = {"rope_scaling": {**LONGROPE, "rope_type": None, "type": name}, "original_max_position_embeddings": 4096}
    assert isinstance(parsed({**raw, "max_position_embeddings": 8192}).scaling, LongRopeScaling)


def test_yarn_without_an_original_length_uses_model_positions() -> None:
    scaling = parsed({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 2.0}}).scaling
    assert isinstance(scaling, YarnScaling) and scaling.original_max_position_embeddings == 512


def test_longrope_factor_count_must_match_rotated_dimensions() -> None:
    raw = {"max_position_embeddings": 8192, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE}
    assert rotation_problems(parsed(raw), 48) == []
    (first, second) = rotation_problems(parsed(raw), 64)
    assert first.startswith("short_factor has 24 numbers; 32 are needed") and second.startswith("long_factor")


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        (
            {"rope_type": "ntk"},
            "rope_scaling.rope_type is 'ntk'; supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_type": "dynamic"}, "rope_scaling.factor is missing; a number above 0 is needed"),
        ({"rope_type": "yarn", "factor": float("nan")}, "rope_scaling.factor is nan; a number above 0 is needed"),
        ({**YARN, "beta_fast": 1, "beta_slow": 4}, "rope_scaling.beta_fast 1.0 is below rope_scaling.beta_slow 4.0"),
        ({**YARN, "truncate": 1}, "rope_scaling.truncate is 1; true or false is needed"),
        ({**LONGROPE}, "rope_scaling.original_max_position_embeddings is missing; a whole number above 0 is needed"),
        ({"rope_type": "longrope"}, "rope_scaling.long_factor is missing; a list of numbers above 0 is needed"),
        (
            {**LONGROPE, "short_factor": [1, -1]},
            "rope_scaling.short_factor is [1, -1]; a list of numbers above 0 is needed",
        ),
    ],
    ids=str,
)
def test_scaling_that_cannot_be_read_is_named(scaling: dict[str, Any], problem: str) -> None:
    problems: list[str] = []
    parse_rope({"max_position_embeddings": 8192, "rope_scaling": scaling}, problems)
    assert problem in problems
