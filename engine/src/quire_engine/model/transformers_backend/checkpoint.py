"""From a folder's safetensors to transformers' model in one floating-point type, its linear layers packed by ours.

The files are checked as a native family's are before transformers reads them: pickles, and files cut short, never reach
it. What transformers then misses, does not expect or finds misshapen is an error that names it.
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
from quire_engine.model.weights import open_checkpoint

_SHOWN_PROBLEMS = 10


class PackedLinear(nn.Module):
    """A linear layer as a backend holds it; it has no weights to look at."""

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
    """Raises ModelFolderError."""
    open_checkpoint(folder)
    model_class: Any = description.model_class
    try:
        model, info = model_class.from_pretrained(
            folder,
            config=description.config,
            dtype=dtype,
            attn_implementation=SERVING,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told by name below
            output_loading_info=True,
        )
    except Exception as error:  # shapes that do not fit, and whatever else a model's own code may raise
        raise ModelFolderError(f"{folder} cannot be loaded by transformers: {error}") from error
    _check_loading(folder, info)
    model.to(device)  # transformers' own way onto a device needs another package
    _check_values(folder, model)
    return _ready(model)


def random_weights(description: Description, dtype: torch.dtype, seed: int, device: torch.device) -> PreTrainedModel:
    """``--load-format dummy``, made on the device."""
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
        f"tensor {name} has shape {list(found)}; config.json makes it {list(expected)}"
        for name, found, expected in sorted(info.get("mismatched_keys", ()))
    ]
    problems += [str(message) for message in info.get("error_msgs", ())]
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ModelFolderError("\n  - ".join([f"{folder} does not fit its config.json:", *shown]))


def _check_values(folder: Path, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        # The extremes are NaN if any element is, and take one pass without a copy.
        if parameter.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(parameter.detach())):
            raise ModelFolderError(f"{folder}: tensor {name} holds NaN or infinity; the checkpoint is damaged")


def weight_bytes(model: PreTrainedModel) -> int:
    """Tied weights count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def looked_up_bytes(model: PreTrainedModel) -> int:
    """The table of embeddings, unless the LM head multiplies by it."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or (head is not None and getattr(head, "weight", None) is table.weight):
        return 0
    return table.weight.numel() * table.weight.element_size()


def packed_numbers(model: PreTrainedModel, names: tuple[str, ...]) -> int:
    """Weights of the named layers."""
    return sum(model.get_submodule(name).get_parameter("weight").numel() for name in names)


def pack_linears(model: PreTrainedModel, names: tuple[str, ...], backend: LinearBackend) -> None:
    """Puts ``backend``'s layers in the place of the named ones, one by one, so that little is held twice."""
    for name in names:
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        module = getattr(parent, own_name)
        weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.t()  # GPT-2's are [K, N]
        bias = None if module.bias is None else module.bias.data
        setattr(parent, own_name, PackedLinear(backend.pack(weight, bias), weight.shape[0]))
