"""A trained model with further layers that have no effect: the answers stay, and a step costs more.

So a small trained pair of target and draft model can be measured at the costs of a larger target. The further layers
have random weights, except for the last product of each half, which is zero.
"""

import json
import shutil
from pathlib import Path

from benchmarks.models.random_model import SILENT, STANDARD_DEVIATION

_LAYER = "model.layers."


def write_padded_model(folder: Path, source: Path, layers: int, *, seed: int = 0) -> None:
    """Write the Llama checkpoint in ``source`` to ``folder`` with ``layers`` further layers at its end."""
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
