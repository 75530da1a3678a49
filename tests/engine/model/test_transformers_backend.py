"""Folders for the transformers backend: their detection, errors before weights are read, and the load check."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from quire_parity.tiny_configs import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions, BuiltModel, Candidate, ModelImpl
from quire_engine.model.linear import choose_linear_backend
from quire_engine.model.loader import find_candidate

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a folder with only a config.json."""

    def make(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return make


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt2"), "gpt2")


def save(folder: Path, model_type: str) -> Path:
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(3)
    factory.from_config(tiny_config(model_type)).save_pretrained(folder)
    return folder


def find(folder: Path, impl: ModelImpl = "auto", *, trust_remote_code: bool = False) -> Candidate:
    return find_candidate(folder, impl=impl, trust_remote_code=trust_remote_code)


@torch.inference_mode()
def build(candidate: Candidate, load_format: Any = "safetensors", dtype: torch.dtype = torch.float32) -> BuiltModel:
    return candidate.build(
        BuildOptions(load_format=load_format, seed=5, dtype=dtype, backend=choose_linear_backend(dtype))
    )


def test_config_with_old_field_names_is_accepted(write: Write) -> None:
    raw = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 96,
        "n_head": 6,
        "n_layer": 3,
        "n_positions": 77,
        "vocab_size": 50,
        "eos_token_id": 49,
    }
    shape = find(write(raw)).shape
    assert (shape.architecture, shape.num_layers, shape.num_kv_heads, shape.head_dim) == ("GPT2LMHeadModel", 3, 6, 16)
    assert (shape.vocab_size, shape.max_position_embeddings, shape.eos_token_ids) == (50, 77, (49,))
    assert shape.kv_groups == (None,)


def test_eos_tokens_are_read_from_the_generation_config(write: Write) -> None:
    folder = write({**tiny_config("olmo2").to_dict()}, {"eos_token_id": [5, 9, 9999]})
    assert find(folder).shape.eos_token_ids == (5, 9)  # there is no token 9999


def test_window_of_the_longest_sequence_is_full_attention(write: Write) -> None:
    raw = tiny_config("starcoder2", sliding_window=24).to_dict()
    assert find(write(raw)).shape.windows == (24, 24)
    assert find(write(raw)).limited_to(24).shape.windows == (None, None)
    assert find(write(raw)).limited_to(25).shape.kv_groups == (24,)


def test_context_ends_where_scaling_would_depend_on_the_batch(write: Write) -> None:
    factors = [1.0] * 8
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    raw = tiny_config("olmo2", rope_parameters={**rope, "original_max_position_embeddings": 32}).to_dict()
    assert find(write(raw)).shape.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("impl", "served_by"), [("auto", "quire's own"), ("native", "quire's own"), ("transformers", "transformers' Llama")]
)
def test_native_family_is_preferred_to_transformers(impl: ModelImpl, served_by: str, tmp_path: Path) -> None:
    assert find(save(tmp_path, "llama"), impl).served_by.startswith(served_by)


def test_native_backend_is_refused_without_a_family(gpt2: Path) -> None:
    with pytest.raises(ModelFolderError, match="architecture GPT2LMHeadModel is not supported"):
        find(gpt2, "native")


INTERFACE = "computes attention by itself and not through transformers' interface"
STATE = "they keep a state that is not a KV cache"


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "words"),
    [
        ("falcon", "FalconForCausalLM", {}, INTERFACE),
        ("bloom", "BloomForCausalLM", {}, INTERFACE),
        ("mpt", "MptForCausalLM", {}, INTERFACE),
        ("gptj", "GPTJForCausalLM", {}, INTERFACE),
        ("gpt_neo", "GPTNeoForCausalLM", {}, INTERFACE),
        ("stablelm", "StableLmForCausalLM", {}, "does not pass the arguments of its forward pass"),
        ("nemotron", "NemotronForCausalLM", {"num_key_value_heads": 8}, "does not pass the arguments"),
        ("falcon_h1", "FalconH1ForCausalLM", {}, STATE),
        ("lfm2", "Lfm2ForCausalLM", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "(conv)"),
        ("mamba", "MambaForCausalLM", {}, STATE),
        ("t5", "T5ForConditionalGeneration", {"is_encoder_decoder": True}, "is an encoder-decoder"),
        ("bart", "BartForCausalLM", {}, "is an encoder-decoder"),
        ("bert", "BertLMHeadModel", {}, "lets tokens see later ones, as encoders do"),
        ("bert", "BertForMaskedLM", {}, "BertForMaskedLM is not a causal language model of transformers"),
        ("deepseek_v32", "DeepseekV32ForCausalLM", {}, "has"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "computes attention 2 times in one layer"),
        ("gpt2", "GPT2LMHeadModel", {"n_positions": None}, "cannot be served"),
        ("gpt2", "GPT2LMHeadModel", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("gpt2", "GPT2LMHeadModel", {"eos_token_id": "end"}, "cannot be served"),
        ("gpt2", 5, {}, "has architectures 5 in its config.json; a list of names is needed"),
        ("gpt2", "GPT2LMHeadModel", {"n_embd": "wide"}, "cannot be served"),
        ("unknown", "UnknownForCausalLM", {}, "has a model_type that transformers"),
        ("unknown", "UnknownForCausalLM", {"auto_map": {"AutoConfig": "a.B"}}, "only with --trust-remote-code"),
    ],
)
def test_models_unfit_for_the_cache_are_refused_with_the_reason(
    model_type: str, architecture: Any, fields: dict[str, Any], words: str, write: Write
) -> None:
    named = [architecture] if isinstance(architecture, str) else architecture
    with pytest.raises(ModelFolderError) as raised:
        find(write({"model_type": model_type, "architectures": named, **fields}))
    message = str(raised.value)
    assert words in message and "cannot be served" in message, message
    assert model_type in message.lower() or str(architecture) in message, message


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="has no config.json"):
        find(tmp_path, "transformers")


def spoil(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


NORM = "transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensor {NORM} is missing"),
        (lambda tensors: tensors.update({"stray.weight": torch.ones(3)}), "tensor stray.weight is unexpected"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(3)}),
            f"tensor {NORM} has shape [3]; config.json requires [64]",
        ),
        (lambda tensors: tensors[NORM].fill_(float("nan")), f"tensor {NORM} contains NaN or infinity"),
    ],
)
def test_unfitting_checkpoint_is_refused_by_the_name_of_the_tensor(
    change: Callable[[dict[str, torch.Tensor]], None], words: str, gpt2: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelFolderError) as raised:
        build(find(spoil(tmp_path, gpt2, change)))
    assert words in str(raised.value) and str(tmp_path) in str(raised.value)


def test_pickles_and_cut_files_never_reach_transformers(gpt2: Path, tmp_path: Path) -> None:
    shutil.copy(gpt2 / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelFolderError, match="only pickle weights"):
        build(find(tmp_path))
    whole = (gpt2 / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ModelFolderError, match="not a whole safetensors file"):
        build(find(tmp_path))


def test_sharded_checkpoints_and_random_weights_build(gpt2: Path, tmp_path: Path) -> None:
    factory: Any = AutoModelForCausalLM
    factory.from_pretrained(gpt2).save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert build(find(tmp_path)).weight_bytes == build(find(gpt2), "dummy").weight_bytes
    assert 2 * build(find(gpt2), dtype=torch.bfloat16).weight_bytes == build(find(gpt2)).weight_bytes


CONFIGURATION = """
from transformers import GPT2Config

class OwnConfig(GPT2Config):
    model_type = "own"
"""
FAITHFUL = """
from transformers import GPT2LMHeadModel
from .configuration_own import OwnConfig

class OwnForCausalLM(GPT2LMHeadModel):
    config_class = OwnConfig
"""
# The embedding of a token depends on all tokens before it in the batch, also those of other sequences.
LEAKING = (
    FAITHFUL
    + """
    def forward(self, input_ids=None, **kwargs):
        embedded = self.transformer.wte(input_ids).cumsum(1)
        return super().forward(inputs_embeds=embedded, **kwargs)
"""
)


@pytest.fixture
def own_code(tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Yield a function that writes a folder whose model is custom code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "own"

    def make(code: str) -> Path:
        folder.mkdir()
        raw = json.loads((gpt2 / "config.json").read_text())
        reference = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
        raw |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": reference}
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "configuration_own.py").write_text(CONFIGURATION)
        (folder / "modeling_own.py").write_text(code)
        shutil.copy(gpt2 / "model.safetensors", folder)
        return folder

    yield make
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_of_the_folder_runs_only_where_it_is_allowed(
    own_code: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_code(FAITHFUL)
    with pytest.raises(ModelFolderError, match="only with --trust-remote-code"):
        find(folder)
    candidate = find(folder, trust_remote_code=True)
    assert candidate.served_by == "transformers' OwnForCausalLM"
    assert "code of the model folder's own runs in the engine process" in caplog.text
    assert build(candidate).weight_bytes > 0


def test_model_that_mixes_packed_sequences_is_refused(own_code: Callable[[str], Path]) -> None:
    candidate = find(own_code(LEAKING), trust_remote_code=True)
    with pytest.raises(ModelFolderError, match="OwnForCausalLM cannot be served faithfully"):
        build(candidate)


def test_remote_code_import_error_is_reported(own_code: Callable[[str], Path]) -> None:
    with pytest.raises(ModelFolderError, match="has code that cannot be loaded: .*no_such_module"):
        find(own_code("import no_such_module\n"), trust_remote_code=True)
