"""Adapters in PEFT's layout: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

Everything is checked before an adapter is served: the type of adapter, the modules, the shapes, the ranks and the
values. Pickled weights are never opened.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.errors import AdapterError, ModelFolderError
from quire_engine.model.adapters.config import AdapterConfig, invalid, read_adapter_config
from quire_engine.model.adapters.slots import AdapterWeights, ModuleAdapter
from quire_engine.model.text_part import text_tensor
from quire_engine.model_folder import check_safetensors

WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "*.pt", "*.pth", "*.ckpt", "*.bin")
_PREFIX = "base_model.model."
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMED = {
    "embed_tokens": "embeddings",
    "lm_head": "the LM head",
    "experts": "the experts of a mixture",
    "gate": "the router of a mixture",
}
"""Modules of base models that cannot have adapters, by a part of their name."""


def read_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], *, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Return an adapter for a model with ``modules`` (outputs and inputs), in ``dtype``. Raise AdapterError."""
    config = read_adapter_config(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = next((found.name for pattern in _PICKLES for found in sorted(folder.glob(pattern))), None)
        if pickled is not None:
            raise invalid(
                f"{folder} has pickled weights ({pickled}), which can run code when loaded; save the adapter as"
                " safetensors"
            )
        raise invalid(f"{folder} has no {WEIGHTS}")
    try:
        check_safetensors(file)
        with safe_open(file, framework="pt") as opened:
            return _read(opened, config, modules, max_rank, dtype)
    except (ModelFolderError, SafetensorError, OSError) as error:
        raise invalid(f"{error}; download the adapter again") from error


def _read(
    opened: Any, config: AdapterConfig, modules: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    halves: dict[str, dict[str, str]] = {}
    for name in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
        module, half = _module_of(name)
        halves.setdefault(module, {})[half] = name
    if not halves:
        raise invalid(f"{WEIGHTS} has no tensors")
    _check_modules(halves, modules, config)
    read: dict[str, ModuleAdapter] = {}
    for module, names in halves.items():
        for half in ("A", "B"):
            if half not in names:
                raise invalid(f"{WEIGHTS}: {module} has no lora_{half}")
        shapes = {half: tuple(opened.get_slice(name).get_shape()) for half, name in names.items()}
        rank = _check_shapes(module, shapes["A"], shapes["B"], modules[module], config)
        if rank > max_rank:
            raise AdapterError(
                AdapterFailure.RANK_TOO_HIGH,
                f"{module} has rank {rank}, and --max-lora-rank is {max_rank}: start the engine with a higher one",
            )
        a = _checked(opened.get_tensor(names["A"]), names["A"], 1.0, dtype)
        b = _checked(opened.get_tensor(names["B"]), names["B"], config.scale_of(module), dtype)
        read[module] = ModuleAdapter(a=a.contiguous(), b=b.t().contiguous())
    return AdapterWeights(rank=max(module.a.shape[0] for module in read.values()), modules=read)


def _module_of(name: str) -> tuple[str, str]:
    """Return the base model's module that a tensor adapts, and which half it is: A or B."""
    whole = name.removeprefix(_PREFIX)
    parts = whole.split(".")
    for half in ("A", "B"):
        if f"lora_{half}" in parts:
            end = parts.index(f"lora_{half}")
            if parts[end + 1 :] in (["weight"], ["default", "weight"]):
                module = text_tensor(".".join(parts[:end]))
                if module is None:
                    raise invalid(f"{WEIGHTS}: {name} adapts the image part of a model; only text is served")
                return module, half
    if "lora_magnitude_vector" in whole:
        raise invalid(f"{WEIGHTS}: {name} is of a DoRA adapter, which also rescales the base weights")
    if "lora_embedding" in whole:
        raise invalid(f"{WEIGHTS}: {name} adapts embeddings; train the adapter for linear layers only")
    raise invalid(f"{WEIGHTS}: {name} is not a matrix of a LoRA adapter; train it without modules_to_save and biases")


def _check_modules(halves: Mapping[str, object], modules: Mapping[str, tuple[int, int]], config: AdapterConfig) -> None:
    """Raise AdapterError unless every module is one of the model's."""
    strange = [module for module in halves if module not in modules]
    if not strange:
        return
    for module in strange:
        for part in module.split("."):
            if part in _NAMED:
                raise invalid(f"{WEIGHTS}: {module} is part of {_NAMED[part]}, which cannot have adapters here")
    kinds = {module.rsplit(".", 1)[-1] for module in modules}
    module = strange[0]
    known = "" if module.rsplit(".", 1)[-1] in kinds else f"; its linear layers are {', '.join(sorted(kinds))}"
    raise AdapterError(
        AdapterFailure.WRONG_BASE, f"the model has no module {module}{known}. The adapter is for {_base(config)}"
    )


def _check_shapes(
    module: str, a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, int], config: AdapterConfig
) -> int:
    """Return the rank of a module. Raise AdapterError if its matrices do not fit the model, or one another."""
    outputs, inputs = shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
        raise invalid(f"{WEIGHTS}: {module} has lora_A {list(a)} and lora_B {list(b)}, which do not fit together")
    if (b[0], a[1]) != shape:
        raise AdapterError(
            AdapterFailure.WRONG_BASE,
            f"{module} has {inputs} inputs and {outputs} outputs in this model, and {a[1]} and {b[0]} in the adapter,"
            f" which is for {_base(config)}",
        )
    if a[0] != config.rank_of(module):
        raise invalid(f"{WEIGHTS}: {module} has rank {a[0]}, and adapter_config.json says {config.rank_of(module)}")
    return a[0]


def _base(config: AdapterConfig) -> str:
    return "another base model" if config.base is None else f"the base model {config.base}"


def _checked(stored: Tensor, name: str, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the tensor times ``scale`` in ``dtype``, in memory of its own. Raise AdapterError for bad values."""
    if stored.dtype not in _DTYPES:
        raise invalid(f"{WEIGHTS}: {name} is {stored.dtype}; {', '.join(map(str, _DTYPES))} are supported")
    scaled = (stored.float() * scale).to(dtype)
    if not all(math.isfinite(extreme) for extreme in torch.aminmax(scaled)):
        raise invalid(f"{WEIGHTS}: {name} has values that are NaN, infinite or too large for {dtype}")
    return scaled
