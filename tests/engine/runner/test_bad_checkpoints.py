"""A folder that cannot be served ends the start with one screen that names the problem, and exit code 2."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.config import EngineConfig
from quire_engine.errors import ModelFolderError
from quire_engine.runner import load_model

DEMO = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
DOWN = "model.layers.1.mlp.down_proj.weight"
Change = Callable[[Path], None]


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return apply


def spoil(value: float) -> Change:
    return tensors(lambda content: content[DOWN].view(-1)[7:8].fill_(value))


def replaced(tensor: Tensor) -> Change:
    return tensors(lambda content: content.update({DOWN: tensor}))


def config(**fields: Any) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return apply


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def index(**files: str) -> Change:
    """Return a change that writes an index of the single file's tensors plus these entries."""

    def apply(folder: Path) -> None:
        held = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**held, **files}}))

    return apply


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


CASES: dict[str, tuple[Change, str]] = {
    "a missing tensor": (tensors(lambda content: content.pop(DOWN)), f"tensor {DOWN} is missing"),
    "an extra tensor": (tensors(lambda content: content.update(extra=torch.zeros(2))), "tensor extra is unexpected"),
    "a misshapen tensor": (replaced(torch.zeros(64, 95)), f"{DOWN} has shape [64, 95]; config.json requires [64, 96]"),
    "NaN": (spoil(float("nan")), f"tensor {DOWN} contains NaN or infinity; the checkpoint is damaged"),
    "infinity": (spoil(float("inf")), f"tensor {DOWN} contains NaN or infinity"),
    "whole numbers": (replaced(torch.zeros(64, 96, dtype=torch.int32)), f"tensor {DOWN} is torch.int32;"),
    "eight bits": (replaced(torch.zeros(64, 96).to(torch.float8_e5m2)), f"tensor {DOWN} is torch.float8_e5m2;"),
    "a truncated file": (cut, "bytes) is not a whole safetensors file"),
    "a file that is not there": (index(x="model-00002.safetensors"), "lacks model-00002.safetensors, which"),
    "an index that promises more": (index(ghost="model.safetensors"), "names ghost in model.safetensors, but no file"),
    "pickles": (pickle, "has only pickle weights (pytorch_model.bin), which can run code when loaded"),
    "an unknown scaling of rope": (
        config(rope_parameters={"rope_type": "magic"}),
        "rope_type is 'magic'; supported: default, linear, dynamic, llama3, yarn, longrope",
    ),
    "a quantized model": (config(quantization_config={"quant_method": "awq"}), "quantization_config is given"),
    "more layers than weights": (config(num_hidden_layers=30), "and 242 more"),
    "more choices than experts": (
        config(architectures=["MixtralForCausalLM"], num_local_experts=2, num_experts_per_tok=3),
        "num_experts_per_tok 3 is more than num_local_experts 2",
    ),
    "heads that cannot be shared": (config(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of"),
    "another width": (config(hidden_size=128), "model.norm.weight has shape [64]; config.json requires [128]"),
}


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_problems_are_reported_on_one_screen(
    name: str, tmp_path: Path, make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> None:
    change, words = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(make_folder(), folder)
    change(folder)
    with pytest.raises(ModelFolderError) as raised:
        load_model(engine_config(folder))
    message = str(raised.value)
    assert words in message and str(folder) in message, message
    assert message.count("\n") <= 12 and raised.value.exit_code == 2


def test_a_real_start_ends_with_exit_code_2_and_no_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    spoil(float("nan"))(folder)
    command = [sys.executable, "-m", "quire_engine", "--model", str(folder), "--host", "127.0.0.1", "--port", "0"]
    ended = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"tensor {DOWN} contains NaN or infinity; the checkpoint is damaged" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("\n") <= 6
