"""The start-up: from options to a model that has generated a token, or to an error that users can fix."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import ConfigOverrides
from quire_engine.runner import load_model

Config = Callable[..., EngineConfig]
Folder = Callable[..., Path]


def test_loaded_model_reports_its_properties(make_folder: Folder, engine_config: Config) -> None:
    model = load_model(engine_config(make_folder(), kv_cache_memory_bytes=100_000))
    assert (model.traits.max_model_len, model.vocab_size, model.traits.eos_token_ids) == (192, 250, (2,))
    assert (model.dtype, model.weights) == ("float32", "float32")
    assert model.layout.groups[0].num_blocks == 12 and model.kv_cache_bytes == 12 * 16 * 512
    attention, mlp, norms = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 96, 2 * 64
    assert model.model_bytes == 4 * (2 * (attention + mlp + norms) + 64 + 2 * 250 * 64)
    assert list(model.phase_seconds) == ["import", "config", "weights", "pack", "kv_cache", "warm_up"]
    assert all(seconds >= 0.0 for seconds in model.phase_seconds.values()) and not model.asynchronous


def test_context_limit_of_the_model_applies_if_the_cache_fits(make_folder: Folder, engine_config: Config) -> None:
    assert load_model(engine_config(make_folder())).traits.max_model_len == 512
    assert load_model(engine_config(make_folder(), max_model_len=100)).traits.max_model_len == 100


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "tokenizer_eos", "expected"),
    [
        (2, None, "<end>", (2, 9)),
        (None, None, "<end>", (9,)),
        (2, [5, 9], "<end>", (5, 9)),
        (None, 5, None, (5,)),
        (None, None, "<far>", ()),
    ],
)
def test_eos_token_of_the_tokenizer_ends_output(
    make_folder: Folder,
    engine_config: Config,
    tmp_path: Path,
    config_eos: int | None,
    generation_eos: int | list[int] | None,
    tokenizer_eos: str | None,
    expected: tuple[int, ...],
) -> None:
    raw = json.loads((make_folder() / "config.json").read_text())
    added = [{"id": 9, "content": "<end>"}, {"id": 5000, "content": "<far>"}]
    for name, content in {
        "config.json": {**raw, "eos_token_id": config_eos},
        "generation_config.json": {"eos_token_id": generation_eos},
        "tokenizer.json": {"added_tokens": added, "model": {}},
        "tokenizer_config.json": {"eos_token": tokenizer_eos},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = engine_config(tmp_path, load_format="dummy", max_model_len=8)
    assert load_model(config).traits.eos_token_ids == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, 512),
        ({"max_position_embeddings": 700}, 700),
        ({"rope_scaling": YARN, "rope_parameters": None}, 2048),
        ({"rope_parameters": YARN}, 2048),
    ],
)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_overrides_of_the_config_lengthen_the_context(
    make_folder: Folder, engine_config: Config, config: dict[str, Any], longest: int, model_impl: str
) -> None:
    overrides = ConfigOverrides(config=config)
    loaded = load_model(engine_config(make_folder(), overrides=overrides, model_impl=model_impl))
    assert loaded.traits.max_model_len == longest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_other_dtypes_run(dtype: str, make_folder: Folder, start: Callable[..., Any]) -> None:
    running = start(make_folder(), dtype=dtype)
    running.add(1, [5, 6, 7], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    running.add(2, list(range(3, 60)), SamplingParams(max_tokens=5, temperature=0.8, ignore_eos=True))
    running.finish()
    assert all(len(tokens) == 5 and all(0 <= token < 250 for token in tokens) for tokens in running.tokens.values())


def test_dummy_weights_need_only_a_config(make_folder: Folder, start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((make_folder() / "config.json").read_bytes())
    running = start(tmp_path, load_format="dummy")
    running.add(1, [5], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    running.finish()
    assert len(running.tokens[1]) == 3


def test_the_shortest_possible_model_warms_up(make_folder: Folder, engine_config: Config) -> None:
    assert load_model(engine_config(make_folder(), max_model_len=1)).traits.max_model_len == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_cache_memory_bytes": 8_000},
            ["8,000 bytes (--kv-cache-memory-bytes)", "512 tokens", "use --kv-cache-memory-bytes 262144"],
        ),
        (
            {"kv_cache_memory_bytes": 8_192 * 6, "max_model_len": 100},
            ["one sequence of 100 tokens", "--kv-cache-memory-bytes 57344, or --max-model-len 96"],
        ),
        ({"max_model_len": 513}, ["--max-model-len 513 is more than the model's 512 positions"]),
        ({"block_size": 8}, ["--block-size 8: a multiple of 16 is needed"]),
        (
            {"block_size": 8, "max_model_len": 600},
            ["--block-size 8", "--max-model-len 600"],
        ),
    ],
)
def test_unservable_options_name_the_flag_and_the_number(
    changes: dict[str, Any], words: list[str], make_folder: Folder, engine_config: Config
) -> None:
    with pytest.raises(FlagsError) as raised:
        load_model(engine_config(make_folder(), **changes))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_folder_without_a_model_is_refused(tmp_path: Path, engine_config: Config) -> None:
    with pytest.raises(ModelFolderError, match="has no config.json"):
        load_model(engine_config(tmp_path))


def test_weights_that_do_not_fit_the_config_are_refused(
    make_folder: Folder, tmp_path: Path, engine_config: Config
) -> None:
    (tmp_path / "config.json").write_bytes((make_folder(tie_word_embeddings=True) / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((make_folder(num_hidden_layers=1) / "model.safetensors").read_bytes())
    with pytest.raises(ModelFolderError, match="tensor model.layers.1.input_layernorm.weight is missing"):
        load_model(engine_config(tmp_path))


@pytest.mark.parametrize("module", ["quire_engine.runner", "quire_engine.ipc.loop"])
def test_importing_the_engine_process_loads_no_torch(module: str) -> None:
    """The engine process reports that it is connected before slow imports."""
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_int8_weights_are_reported_and_tokens_ignore_the_batch(
    make_folder: Folder, engine_config: Config, start: Callable[..., Any]
) -> None:
    folder = make_folder()
    model = load_model(engine_config(folder, quantization="int8"))
    attention, mlp, norms = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 96, 2 * 64
    multiplied = 2 * (attention + mlp) + 250 * 64
    assert (model.weights, model.model_bytes) == ("int8", multiplied + 4 * (2 * norms + 64 + 250 * 64))
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone, together = start(folder, quantization="int8"), start(folder, quantization="int8")
    alone.add(1, [5, 6, 7], greedy)
    for key in range(1, 9):
        together.add(key, [5, 6, 7] if key == 1 else list(range(key, 5 * key)), greedy)
    for running in (alone, together):
        running.finish()
    assert alone.tokens[1] == together.tokens[1] and len(alone.tokens[1]) == 12
