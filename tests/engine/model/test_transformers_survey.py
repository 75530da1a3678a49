"""Every causal model type of transformers, probed without weights: how many run with our cache, and why others fail.

A new release of transformers changes the number and the table in ADR 0026; the changes are then to be reviewed.
"""

from typing import Any

import pytest
import torch
import transformers
from quire_parity.tiny_configs import tiny_config
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire_engine.errors import ModelFolderError
from quire_engine.model.linear import choose_linear_backend
from quire_engine.model.transformers_backend import attention, checkpoint
from quire_engine.model.transformers_backend.candidate import judge_class, make_shape
from quire_engine.model.transformers_backend.description import Description, Unservable, describe_config
from quire_engine.model.transformers_backend.model import TransformersModel
from quire_engine.model.transformers_backend.self_test import check_faithful
from quire_engine.runner.kv_cache import cache_groups

pytestmark = pytest.mark.slow
TYPES: dict[str, Any] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def describe(model_type: str, **changes: Any) -> Description:
    name = TYPES[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    try:
        config = tiny_config(model_type, **changes)
    except Exception:  # its configuration does not accept sizes as small as ours
        config = AutoConfig.for_model(model_type, **changes)
    return describe_config(model_class, config, {})


def verdict(model_type: str) -> str:
    try:
        judge_class(describe(model_type))
    except Unservable as error:
        return str(error)
    except Exception:  # it has no model; only other configurations use it
        return "configuration"
    return "served"


def test_every_causal_type_is_served_or_refused_for_a_reason() -> None:
    verdicts = {model_type: verdict(model_type) for model_type in TYPES}
    assert list(verdicts.values()).count("served") == 93, verdicts
    drops_metadata = "does not pass the arguments of its forward pass"
    assert {name for name, why in verdicts.items() if why.startswith(drops_metadata)} == {"nemotron", "stablelm"}
    own_attention = {name for name, why in verdicts.items() if why.startswith("computes attention by itself")}
    assert own_attention >= {"falcon", "bloom", "mpt", "gptj", "gpt_neo"}


WIDE = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
SHARED = ["sliding_attention", "full_attention"] * 2


# One model of each kind that differs from the families of the parity table.
@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("deepseek_v3", {}, (None, None)),  # values narrower than keys
        ("gemma3n_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4}, None),
        ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}, (24, None)),
        ("olmoe", {}, (None, None)),  # a mixture of experts
        ("gpt_bigcode", {}, (None, None)),  # one KV head
        ("moshi", {}, None),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}, (24, None)),  # sinks
        # Chunks; the layer without them has no rotation, and scales its queries by their positions from the fifth on.
        ("llama4_text", {"attention_chunk_size": 8, "floor_scale": 4, "no_rope_layers": [1, 0]}, (8, None)),
        ("gemma4_text", {"layer_types": WINDOWED, "num_hidden_layers": 4, **WIDE}, (24, 24, 24, None)),
        # Layers that use the keys and values of others.
        ("gemma4_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SHARED, **WIDE}, None),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, (None, None)),
    ],
)
@torch.inference_mode()
def test_packed_batch_equals_single_sequences_of_a_random_model(
    model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...] | None
) -> None:
    attention.register()
    description = describe(model_type, **changes)
    layers, probe = judge_class(description)
    assert windows is None or layers.windows == windows
    model = checkpoint.random_weights(description, torch.float32, 11, torch.device("cpu"))
    checkpoint.pack_linears(model, probe.linears, choose_linear_backend(torch.float32))
    shape = make_shape(description, layers, probe)
    check_faithful(model, TransformersModel(model, layers, shape.windows), shape, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelFolderError, match="cannot be served"):  # the load check would have detected it
        wrong = torch.nn.Module.get_submodule(model, layers.names[0])
        unlike = TransformersModel(model, layers, shape.windows)
        unlike._places[wrong] = unlike._places[model.get_submodule(layers.names[-1])]
        check_faithful(model, unlike, shape, torch.float32, torch.device("cpu"))


def test_layers_with_other_head_sizes_have_separate_caches() -> None:
    description = describe("gemma4_text", num_hidden_layers=4, layer_types=WINDOWED, **WIDE)
    shape = make_shape(description, *judge_class(description))
    assert [(heads.kv_heads, heads.head_dim) for heads in shape.layer_heads] == [(2, 16)] * 3 + [(1, 32)]
    sizes = [(group.window, group.block_bytes) for group in cache_groups(shape, torch.float32, 16)]
    assert sizes == [(24, 3 * 16 * 2 * 2 * 16 * 4), (None, 16 * 2 * 32 * 4)]


def test_a_window_wider_than_any_test_is_still_a_window() -> None:
    layers, _ = judge_class(describe("gemma2", sliding_window=4096, max_position_embeddings=8192))
    assert layers.windows == (4096, None)
