"""Models with known answers or costs, made from others: successors, further layers of no effect, random adapters."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models.random_model import SILENT, STANDARD_DEVIATION, LlamaShape, random_weights, write_description

_LAYER = "model.layers."


def write_successor_model(folder: Path, shape: LlamaShape, successors: Sequence[int], *, seed: int = 0) -> None:
    """Write a checkpoint in which token i is followed by ``successors[i]``, a permutation, whatever came before.

    Embeddings are random, the output layer compares with the embedding of each token's predecessor, and the layers add
    nothing: their last products are zero. A step costs what it costs a trained model. Embeddings must not be tied.
    """
    import torch
    from safetensors.torch import save_file

    if shape.tied_embeddings or sorted(successors) != list(range(shape.vocabulary)):
        raise ValueError("a successor model has untied embeddings and one successor for each token")
    tensors = random_weights(shape, seed=seed, silent=SILENT)
    embeddings = tensors["model.embed_tokens.weight"]
    output = torch.empty_like(embeddings)
    output[torch.tensor(successors)] = embeddings
    tensors["lm_head.weight"] = output
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_description(folder, shape)


def write_padded_model(folder: Path, source: Path, layers: int, *, seed: int = 0) -> None:
    """Write the Llama checkpoint in ``source`` to ``folder`` with further layers that have no effect but their cost."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    own = config["num_hidden_layers"]
    tensors = load_file(str(source / "model.safetensors"))
    first = {name.removeprefix(f"{_LAYER}0."): tensor for name, tensor in tensors.items() if f"{_LAYER}0." in name}
    generator = torch.Generator().manual_seed(seed)
    for number in range(own, own + layers):
        for name, tensor in first.items():
            if name.endswith(SILENT):
                added = torch.zeros_like(tensor)
            elif tensor.ndim == 1:
                added = torch.ones_like(tensor)
            else:
                added = torch.empty(tensor.shape).normal_(std=STANDARD_DEVIATION, generator=generator).to(tensor.dtype)
            tensors[f"{_LAYER}{number}.{name}"] = added
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": own + layers}, indent=1) + "\n")


def write_random_adapters(folder: Path, model: Path, *, count: int, rank: int) -> list[Path]:
    """Write ``count`` different adapters for all linear layers of a native model, and return their folders."""
    import torch
    from safetensors.torch import save_file

    from quire_engine.model.adapters.layout import module_shapes
    from quire_engine.model.decoder import joined_linears
    from quire_engine.model.loader import find_native_candidate

    shapes = module_shapes(joined_linears(find_native_candidate(model).shape))
    generator = torch.Generator().manual_seed(7)
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    folders = []
    for number in range(count):
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.empty(shape).normal_(std=STANDARD_DEVIATION, generator=generator)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = values.bfloat16()
        own = folder / f"adapter-{number}"
        own.mkdir(parents=True)
        save_file(tensors, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": targets}
        (own / "adapter_config.json").write_text(json.dumps(config))
        folders.append(own)
    return folders
