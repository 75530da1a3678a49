"""Rotations in the forms of transformers 4 and 5, in config.json and in overrides: all mean what transformers reads."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from quire_common.model_memory import FAMILY_DEFAULTS, FULL, SLIDING
from quire_engine.config_overrides import with_overrides
from quire_engine.model.config import parse_config, unread_overrides
from quire_engine.model.families import SUPPORTED
from quire_engine.model.rope_frequencies import rotation
from quire_engine.model.text_part import decoder_config
from quire_engine.model.transformers_backend.description import describe
from quire_engine.model_folder import ConfigOverrides

POSITIONS = 512
TEXT: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": None,
}
PLAIN = {
    "Gemma2ForCausalLM": ("gemma2", Gemma2RotaryEmbedding),
    "Gemma3ForCausalLM": ("gemma3_text", Gemma3RotaryEmbedding),
    "LlamaForCausalLM": ("llama", LlamaRotaryEmbedding),
    "MistralForCausalLM": ("mistral", MistralRotaryEmbedding),
    "MixtralForCausalLM": ("mixtral", MixtralRotaryEmbedding),
    "Phi3ForCausalLM": ("phi3", Phi3RotaryEmbedding),
    "Qwen2ForCausalLM": ("qwen2", Qwen2RotaryEmbedding),
    "Qwen3ForCausalLM": ("qwen3", Qwen3RotaryEmbedding),
    "Qwen3MoeForCausalLM": ("qwen3_moe", Qwen3MoeRotaryEmbedding),
}
WHOLE = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text", Gemma3RotaryEmbedding),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral", MistralRotaryEmbedding),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2_vl_text", Qwen2VLRotaryEmbedding),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text", Qwen2_5_VLRotaryEmbedding),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl_text", Qwen3VLTextRotaryEmbedding),
}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.9, 2.2, 2.6],
    "long_factor": [1.3, 1.7, 2.0, 3.5, 6.0, 9.0, 14.0, 20.0],
    "original_max_position_embeddings": 1024,
}
THETAS = st.sampled_from([1e4, 7e4, 1e6])


def test_every_native_family_is_covered() -> None:
    assert set(PLAIN) == set(SUPPORTED)
    assert set(WHOLE) == {whole for family in FAMILY_DEFAULTS.values() for whole in family.text_part_of}


def in_form(form: int, by_kind: bool, theta: float | None, scaling: Any, local: float | None) -> dict[str, Any]:
    """Return the fields of a rotation. A theta that is None is left out; a scaling that is None is null."""
    if form == 4:
        fields = {"rope_theta": theta, **({"rope_local_base_freq": local} if by_kind else {})}
        given = {name: value for name, value in fields.items() if value is not None}
        return given if scaling == {} else {**given, "rope_scaling": scaling}
    full = {**({} if theta is None else {"rope_theta": theta}), **(scaling or {})}
    if scaling is None:
        full["rope_type"] = "default"
    if not by_kind:
        return {"rope_parameters": full}
    sliding = {} if local is None else {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


def read_by_transformers(raw: dict[str, Any]) -> Any:
    """Return transformers' configuration; it changes the objects that it reads."""
    return CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw))


def rotations(config: Any, rotary: Any) -> Iterator[tuple[torch.Tensor, float]]:
    """Return transformers' frequencies and magnitudes, of full attention first."""
    module = rotary(config)
    kinds = [f"{FULL}_", f"{SLIDING}_"] if rotary is Gemma3RotaryEmbedding else [""]
    for kind in kinds:
        yield getattr(module, f"{kind}inv_freq"), getattr(module, f"{kind}attention_scaling")


@given(st.data())
def test_rotations_are_those_of_transformers_in_every_form(data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from([*PLAIN, *WHOLE]))
    whole, text_type, rotary = WHOLE.get(architecture) or (None, *PLAIN[architecture])
    by_kind = rotary is Gemma3RotaryEmbedding
    scalings = (SCALINGS[0], LONGROPE) if text_type == "phi3" else SCALINGS
    base = (data.draw(THETAS), data.draw(st.sampled_from([None, *scalings])), data.draw(THETAS))
    changes = (
        data.draw(st.none() | THETAS),
        data.draw(st.sampled_from([{}, None, *scalings])),
        data.draw(st.none() | THETAS),
    )
    file_form, form = data.draw(st.sampled_from([4, 5])), data.draw(st.sampled_from([4, 5]))
    named = data.draw(st.sampled_from(["type", "rope_type"]))

    text = {**TEXT, "model_type": text_type, "architectures": [architecture]}
    if text_type == "phi3":
        text["original_max_position_embeddings"] = LONGROPE["original_max_position_embeddings"]

    def placed(fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields where the decoder of this model reads them."""
        return fields if whole is None else {"text_config": fields}

    def raw(rope: dict[str, Any]) -> dict[str, Any]:
        return {"architectures": [architecture], "model_type": whole or text_type, **placed({**text, **rope})}

    asked = in_form(form, by_kind, *changes)
    if form == 4 and isinstance(asked.get("rope_scaling"), dict):
        scaling = dict(asked["rope_scaling"])
        asked["rope_scaling"] = {named: scaling.pop("rope_type"), **scaling}
    found = with_overrides(raw(in_form(file_form, by_kind, *base)), placed(asked))

    merged = None if changes[1] is None else {**(base[1] or {}), **changes[1]}
    right = in_form(4, by_kind, changes[0] or base[0], merged, changes[2] or base[2])
    expected = list(rotations(read_by_transformers({**text, **right}), rotary))

    problems: list[str] = []
    own = parse_config(decoder_config(found), {}, SUPPORTED, problems)
    assert own is not None, problems
    kinds = dict.fromkeys(zip((window is not None for window in own.windows), own.ropes, strict=True))
    ropes = [rope for _, rope in sorted(kinds, key=lambda kind: by_kind and kind[0])] if by_kind else [own.ropes[0]]
    read = list(rotations(read_by_transformers(found).get_text_config(), rotary))
    for rope, one, (frequencies, magnitude) in zip(ropes, read, expected, strict=True):
        computed = rotation(rope, own.rotary_dim, POSITIONS)
        torch.testing.assert_close(torch.tensor(computed.frequencies), frequencies, rtol=2e-6, atol=0.0)
        torch.testing.assert_close(one[0], frequencies, rtol=0.0, atol=0.0)
        assert computed.magnitude == pytest.approx(magnitude) and one[1] == magnitude


@pytest.mark.parametrize("architecture", [*PLAIN, *WHOLE])
def test_absent_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    whole, text_type, _ = WHOLE.get(architecture) or (None, *PLAIN[architecture])
    text = {**TEXT, "model_type": text_type}
    raw = {"architectures": [architecture], **({"model_type": whole, "text_config": text} if whole else text)}
    own = parse_config(decoder_config(raw), {}, SUPPORTED, [])
    assert own is not None
    config = read_by_transformers(raw)
    theirs = config.get_text_config()
    rope, kinds = theirs.rope_parameters, getattr(theirs, "layer_types", None) or [SLIDING] * len(own.windows)
    window = getattr(theirs, "sliding_window", None)
    assert own.rms_norm_eps == theirs.rms_norm_eps
    assert own.tie_word_embeddings == config.tie_word_embeddings
    assert own.windows == tuple(window if kind == SLIDING else None for kind in kinds)
    assert [one.theta for one in own.ropes] == [rope.get(kind, rope)["rope_theta"] for kind in kinds]


def test_window_of_mistral_is_removed_by_null_alone() -> None:
    for raw in (
        {**TEXT, "architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**TEXT, "sliding_window": None}},
    ):
        own = parse_config(decoder_config(raw), {}, SUPPORTED, [])
        assert own is not None and set(own.windows) == {None}


YARN, LLAMA3 = SCALINGS[2], SCALINGS[4]


@pytest.mark.parametrize(
    ("fields", "theta", "factor"),
    [
        ({"rope_scaling": YARN, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 7e4}, 7e4, 4.0),
        ({"rope_scaling": YARN, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 1e4, 4.0),
        ({"rope_scaling": {}, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5, 8.0),
        ({"rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 7e4}, 5e5, 8.0),
    ],
)
def test_file_with_both_fields_is_read_as_by_transformers(fields: dict[str, Any], theta: float, factor: float) -> None:
    raw = {**TEXT, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **fields}
    config = parse_config(raw, {}, SUPPORTED, [])
    theirs = read_by_transformers(raw).rope_parameters
    assert config is not None and config.ropes[0].scaling is not None
    assert (theta, factor) == (theirs["rope_theta"], theirs["factor"])
    assert (theta, factor) == (config.ropes[0].theta, getattr(config.ropes[0].scaling, "factor", None))


@pytest.mark.parametrize(
    ("file", "overrides", "merged"),
    [
        ({"dtype": "bfloat16"}, {"torch_dtype": "float32"}, {"torch_dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "float32"}),
        ({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {}}, {"a": {"b": 1, "d": 3}, "c": {}}),
        ({"rope_parameters": {"rope_theta": 1e4}}, {"rope_scaling": "yarn"}, {"rope_scaling": "yarn"}),
        (
            {"original_max_position_embeddings": 4096},
            {"rope_scaling": {"original_max_position_embeddings": 128}},
            {"original_max_position_embeddings": 128},
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            {"partial_rotary_factor": 0.25},
            {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 1e4}},
        ),
    ],
)
def test_overrides_replace_the_other_name_too(
    file: dict[str, Any], overrides: dict[str, Any], merged: dict[str, Any]
) -> None:
    found = with_overrides(file, overrides)
    assert {**found, **merged} == found
    assert {"dtype", "torch_dtype"} - found.keys()


GEMMA_TEXT = {**TEXT, "sliding_window": 8, "model_type": "gemma3_text"}
UNREAD: tuple[tuple[str, dict[str, Any], dict[str, Any], list[str]], ...] = (
    ("llama", {}, {"rope_scaling": YARN, "max_position_embeddings": 1024, "dtype": "float32"}, []),
    ("llama", {}, {"rope_scalling": YARN}, [f"rope_scalling.{name}" for name in YARN]),
    ("llama", {}, {"rope_scaling": {**YARN, "low_freq_factor": 1.0}}, ["rope_scaling.low_freq_factor"]),
    ("llama", {}, {"rope_theta": 1e4, "tie_word_embeddings": False, "eos_token_id": [3]}, []),
    ("llama", {}, {"is_original_qwen3_reranker": True, "rope_scaling": None}, ["is_original_qwen3_reranker"]),
    ("llama", {}, {"sliding_window": 4, "architectures": ["MistralForCausalLM"]}, []),
    ("qwen2", {}, {"use_sliding_window": False, "sliding_window": 4}, ["sliding_window"]),
    ("qwen2", {}, {"use_sliding_window": True, "sliding_window": 4}, []),
    ("gemma3", {"text_config": GEMMA_TEXT}, {"max_position_embeddings": 99}, ["max_position_embeddings"]),
    ("gemma3", {"text_config": GEMMA_TEXT}, {"text_config": {"max_position_embeddings": 99}}, []),
)


@pytest.mark.parametrize(("model_type", "fields", "overrides", "unread"), UNREAD)
def test_overrides_that_a_native_family_does_not_read_are_named(
    tmp_path: Path, model_type: str, fields: dict[str, Any], overrides: dict[str, Any], unread: list[str]
) -> None:
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    named = architectures.get(model_type, "Gemma3ForConditionalGeneration")
    raw = {**(fields or TEXT), "model_type": model_type, "architectures": [named]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert unread_overrides(tmp_path, SUPPORTED, ConfigOverrides(config=overrides)) == unread


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ({"rope_scaling": YARN, "dtype": "float32", "clip_qkv": 4.0}, ""),
        ({"rope_scalling": YARN, "n_positions": 9, "max_position_embeddings": 99}, "rope_scalling, n_positions"),
    ],
)
def test_overrides_that_transformers_does_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: dict[str, Any], unread: str
) -> None:
    raw = {**TEXT, "model_type": "olmo", "architectures": ["OlmoForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    describe(tmp_path, trust_remote_code=False, overrides=ConfigOverrides(config=overrides))
    said = [record.args for record in caplog.records if record.name == "quire_engine.model.config"]
    assert said == ([(unread, "transformers' OlmoConfig")] if unread else [])
