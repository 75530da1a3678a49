"""The loading of a folder's safetensors into transformers' model in one dtype, with linear layers packed by us.

The files are checked like those of a native family before transformers reads them: pickles and truncated files never
reach it. Tensors that transformers then reports as missing, unexpected or misshapen are errors that name them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire_engine.errors import ModelFolderError
from quire_engine.model.linear import Linear, LinearBackend
from quire_engine.model.transformers_backend.attention import SERVING
from quire_engine.model.transformers_backend.description import Description
from quire_engine.model.weights import open_checkpoint, refuse_tensors
from quire_engine.model_folder import INDEX, WHOLE_FILE


class PackedLinear(nn.Module):
    """A linear layer in a backend's format; it has no weight attribute."""

    def __init__(self, multiply: Linear, outputs: int) -> None:
        super().__init__()
        self._multiply = multiply
        self._outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self._outputs)
        if x.numel() == 0:
            return x.new_empty(shape)
        return self._multiply(x.reshape(-1, x.shape[-1])).view(shape)


def load_weights(folder: Path, description: Description, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model with its weights. Raise ModelFolderError."""
    source = open_checkpoint(folder)
    # transformers finds files only by their usual names.
    is_usual = any((folder / name).is_file() for name in (WHOLE_FILE, INDEX))
    model_class: Any = description.model_class
    try:
        model, info = model_class.from_pretrained(
            folder if is_usual else None,
            state_dict=None if is_usual else {name: source.read(name) for name in source.shapes()},
            config=description.config,
            dtype=dtype,
            attn_implementation=SERVING,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the error below names them
            output_loading_info=True,
        )
    except Exception as error:  # mismatched shapes, and anything that a model's own code may raise
        raise ModelFolderError(f"{folder} cannot be loaded by transformers: {error}") from error
    _check_loading(folder, info)
    model.to(device)  # transformers' own device placement needs another package
    _check_values(folder, model)
    return _ready(model)


def random_weights(description: Description, dtype: torch.dtype, seed: int, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights on the device (``--load-format dummy``)."""
    torch.manual_seed(seed)
    with device:
        model = description.model_class._from_config(description.config, dtype=dtype, attn_implementation=SERVING)
    return _ready(model)


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


def _check_loading(folder: Path, info: dict[str, Any]) -> None:
    problems = [f"tensor {name} is missing" for name in sorted(info.get("missing_keys", ()))]
    problems += [f"tensor {name} is unexpected" for name in sorted(info.get("unexpected_keys", ()))]
    problems += [
        f"tensor {name} has shape {list(found)}; config.json requires {list(expected)}"
        for name, found, expected in sorted(info.get("mismatched_keys", ()))
    ]
    problems += [str(message) for message in info.get("error_msgs", ())]
    refuse_tensors(str(folder), problems)


def _check_values(folder: Path, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        # The extremes are NaN if any element is, and take one pass without a copy.
        if parameter.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(parameter.detach())):
            raise ModelFolderError(f"{folder}: tensor {name} contains NaN or infinity; the checkpoint is damaged")


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights; tied weights count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def looked_up_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the embedding table, unless the LM head multiplies by it."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or (head is not None and getattr(head, "weight", None) is table.weight):
        return 0
    return table.weight.numel() * table.weight.element_size()


def packed_numbers(model: PreTrainedModel, names: tuple[str, ...]) -> int:
    """Return the number of weights in the named layers."""
    return sum(model.get_submodule(name).get_parameter("weight").numel() for name in names)


def pack_linears(model: PreTrainedModel, names: tuple[str, ...], backend: LinearBackend) -> None:
    """Replace the named layers by the backend's, one by one, so that few weights are in memory twice."""
    for name in names:
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        module = getattr(parent, own_name)
        weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.t()  # GPT-2's are [K, N]
        bias = None if module.bias is None else module.bias.data
        setattr(parent, own_name, PackedLinear(backend.pack(weight, bias), weight.shape[0]))
