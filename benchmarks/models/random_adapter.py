"""Adapters with random matrices for all linear layers of a model folder, in PEFT's layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire_engine.model.adapters.layout import module_shapes
from quire_engine.model.decoder import joined_linears
from quire_engine.model.loader import find_native_candidate

_STD = 0.02


def write_random_adapters(folder: Path, model: Path, *, count: int, rank: int) -> list[Path]:
    """Write ``count`` different adapters of a native model, and return their folders."""
    shapes = module_shapes(joined_linears(find_native_candidate(model).shape))
    generator = torch.Generator().manual_seed(7)
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    folders = []
    for number in range(count):
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.empty(shape).normal_(std=_STD, generator=generator)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = values.bfloat16()
        own = folder / f"adapter-{number}"
        own.mkdir(parents=True)
        save_file(tensors, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": targets}
        (own / "adapter_config.json").write_text(json.dumps(config))
        folders.append(own)
    return folders
