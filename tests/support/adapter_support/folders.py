"""Folders in PEFT's layout with random matrices, and checkpoints into which such an adapter is merged."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each linear layer in a model's decoder layers, by module."""
    tensors = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if ".layers." in name and tensor.dim() == 2 and name.endswith(".weight")
    }


def make_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    std: float = 0.1,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for the modules of ``shapes``; ``ranks`` has other ranks by module, ``config`` other fields."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        own = (ranks or {}).get(module, rank)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * std
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * std
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps({**content, **config}))
    return folder


def merge(model: Path, adapter: Path, folder: Path, scales: Mapping[str, float] | None = None) -> Path:
    """Write the model with the adapter merged; ``scales`` has the factor of modules that differ from alpha / r."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    common = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    weights, matrices = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if ".lora_A." in name:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = matrices[name.replace(".lora_A.", ".lora_B.")]
            scale = (scales or {}).get(module, common)
            weight = weights[f"{module}.weight"]
            merged = weight.double() + scale * (b.double() @ a.double())
            weights[f"{module}.weight"] = merged.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_kinds(shapes: Mapping[str, tuple[int, int]], kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the modules whose names end with one of the kinds, such as q_proj."""
    return {module: shape for module, shape in shapes.items() if module.rsplit(".", 1)[-1] in kinds}
