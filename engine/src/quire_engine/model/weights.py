"""The tensors of a checkpoint: they are located, compared with the family's expectations, and read one by one.

safetensors files are mapped into memory, so a tensor's bytes are read from disk when they are first used. A page stays
in this process's memory as long as the file is mapped, so files are unmapped and mapped again while they are read: none
is ever completely in memory. On a GPU each tensor is uploaded directly, and checked and converted there. Before any
tensor is read, all must be present with the expected shape, and none may be unexpected.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_engine.errors import ModelFolderError
from quire_engine.model.config import ModelConfig
from quire_engine.model.kv_scales import is_kv_scale
from quire_engine.model.model_part import Split
from quire_engine.model.upload import Upload
from quire_engine.model_folder import INDEX, WHOLE_FILE

if TYPE_CHECKING:
    from quire_engine.model.decoder import Family

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN_PROBLEMS = 10
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAPPED_BYTES = 64 << 20
"""The bytes read from the mapped files before they are unmapped; mapping one again costs reading its header."""

_COMPARED_ROWS = 4096


class TensorSource(Protocol):
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, part: int | None = None, split: Split | None = None) -> Tensor:
        """Return a tensor, or one part of it along the first dimension, or of that the elements of a rank."""
        ...


class Safetensors:
    """The safetensors files of a folder: one, or several with different tensors."""

    def __init__(
        self, folder: Path, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], upload: Upload
    ) -> None:
        """Create the source. ``files`` has the file of each tensor; ``upload`` copies tensors to the device."""
        self._folder = folder
        self._files = files
        self._shapes = shapes
        self._upload = upload
        self._mapped: dict[Path, Any] = {}
        self._mapped_bytes = 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: int | None = None, split: Split | None = None) -> Tensor:
        """Return a tensor. On a CPU it lies in the file's pages, which stay in memory as long as the tensor."""
        mapped = self._map(name, part, split)
        if mapped.dtype not in _DTYPES:
            raise ModelFolderError(
                f"{self._folder}: tensor {name} is {mapped.dtype}; {', '.join(map(str, _DTYPES))} are supported:"
                " use the model's checkpoint in 16 or 32 bits"
            )
        tensor = self._upload(mapped)
        # The extremes are NaN if any element is, and take one pass without a copy.
        if tensor.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
            raise ModelFolderError(f"{self._folder}: tensor {name} contains NaN or infinity; the checkpoint is damaged")
        return tensor

    def _map(self, name: str, part: int | None, split: Split | None) -> Tensor:
        if self._mapped_bytes >= _MAPPED_BYTES:
            self._mapped.clear()
            self._mapped_bytes = 0
        path = self._files[name]
        if path not in self._mapped:
            self._mapped[path] = _open(path)
        file = self._mapped[path]
        tensor: Tensor
        if split is not None:
            tensor = _join([file.get_slice(name)[index] for index in _indices(part, split)], split.dim)
        else:
            tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        self._mapped_bytes += tensor.nbytes
        return tensor


class RenamedTensors:
    """The tensors of another source under other names; ``rename`` returns None for those that are left out."""

    def __init__(self, source: TensorSource, rename: Callable[[str], str | None]) -> None:
        self._source = source
        names = {name: rename(name) for name in source.shapes()}
        self._names = {own: name for name, own in names.items() if own is not None}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes()
        return {own: shapes[name] for own, name in self._names.items()}

    def read(self, name: str, part: int | None = None, split: Split | None = None) -> Tensor:
        return self._source.read(self._names[name], part, split)


def with_prefixes(source: TensorSource) -> TensorSource:
    """Return the source under the names of a model with an LM head, which embedding models often leave out."""
    if "embed_tokens.weight" not in source.shapes():
        return source
    return RenamedTensors(source, lambda name: name if name.startswith("lm_head.") else f"model.{name}")


class RandomWeights:
    """Random values of the right shapes on a device (``--load-format dummy``), for benchmarks.

    The values of a tensor depend on the seed and its name, so that a part of a model has those of the whole model.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], *, seed: int, device: torch.device) -> None:
        self._expected = expected
        self._seed = seed
        self._generator = torch.Generator(device)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._expected

    def read(self, name: str, part: int | None = None, split: Split | None = None) -> Tensor:
        assert part is None, "a family's own layout has a tensor for each expert"
        shape, device = self._expected[name], self._generator.device
        if len(shape) == 1:
            tensor = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device=device)
        else:
            self._generator.manual_seed(_seed_of(name, self._seed))
            tensor = torch.empty(shape, device=device).normal_(std=0.02, generator=self._generator)
        # Every rank fills whole tensors, so that all ranks have parts of the same model.
        return tensor if split is None else _join([tensor[index] for index in _indices(None, split)], split.dim).clone()


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])


def _indices(part: int | None, split: Split) -> list[tuple[int | slice, ...]]:
    """Return the index of each span of a split tensor, within its part."""
    before: tuple[int | slice, ...] = () if part is None else (part,)
    return [(*before, *[slice(None)] * split.dim, slice(begin, end)) for begin, end in split.spans]


def _join(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


class TensorReader:
    """A ``family.ReadTensor``. ``seconds`` is the time spent reading so far, without processing."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, split: Callable[[str], Split | None] = lambda name: None
    ) -> None:
        """Create the reader. ``split`` returns the share of a tensor to read; None means all of it."""
        self._source = source
        self._dtype = dtype
        self._split = split
        self.seconds = 0.0

    @property
    def names(self) -> Collection[str]:
        return self._source.shapes().keys()

    def __call__(self, name: str, part: int | None = None) -> Tensor:
        began = time.perf_counter()
        split = self._split(name)
        tensor = self._source.read(name, part, split)
        converted = tensor.to(self._dtype)
        if self._dtype == torch.float16 and tensor.dtype != torch.float16:
            largest = float(tensor.abs().max()) if tensor.numel() else 0.0
            if largest > torch.finfo(torch.float16).max:
                raise ModelFolderError(
                    f"tensor {name} has the value {largest:g}, and float16 ends at 65504; "
                    "use --dtype bfloat16 or float32"
                )
        if split is not None and split.is_zero:
            converted = torch.zeros_like(converted)
        # Small tensors are kept unchanged, and a view would keep a whole file mapped.
        read = in_own_memory(converted) if converted.dim() == 1 else converted
        self.seconds += time.perf_counter() - began
        return read


def in_own_memory(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is kept unchanged, outside the mapped file.

    The file may change or be removed while the model is served.
    """
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def open_checkpoint(folder: Path, upload: Upload = lambda mapped: mapped) -> Safetensors:
    """Return the checkpoint. Raise ModelFolderError if there is no complete safetensors checkpoint."""
    index = _read_index(folder)
    names = sorted(set(index.values())) if index else _files_without_index(folder)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelFolderError(f"{folder} lacks {_few(absent)}, which {INDEX} names; copy or download the rest")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        opened = _open(folder / name)
        for tensor in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
            if tensor in files:
                raise ModelFolderError(
                    f"{folder}: tensor {tensor} is in {name} and in {files[tensor].name}; only one of the two files"
                    " belongs to the checkpoint"
                )
            files[tensor] = folder / name
            shapes[tensor] = tuple(opened.get_slice(tensor).get_shape())
    lacking = [f"{tensor} in {name}" for tensor, name in index.items() if tensor not in files]
    if lacking:
        raise ModelFolderError(
            f"{folder}: {INDEX} names {_few(lacking)}, but no file holds that; index and files are of different"
            " checkpoints: copy or download them again"
        )
    return Safetensors(folder, files, shapes, upload)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor; an empty dict if there is no index."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    try:
        files = json.loads(file.read_bytes())["weight_map"]
        named = dict(files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{file} is not an index of safetensors files: {error!r}") from error
    wrong = [name for name in named.values() if not isinstance(name, str) or Path(name).name != name]
    if wrong or not named:
        problem = f"{wrong[0]!r} is not the name of a file next to it" if wrong else "weight_map is empty"
        raise ModelFolderError(f"{file} is not an index of safetensors files: {problem}")
    return named


def _files_without_index(folder: Path) -> list[str]:
    """Return the usual single file, else every safetensors file: together they are the checkpoint."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return [WHOLE_FILE] if WHOLE_FILE in found else found
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelFolderError(
            f"{folder} has only pickle weights ({', '.join(pickles[:3])}), which can run code when loaded;"
            " convert them to safetensors (transformers: model.save_pretrained)"
        )
    raise ModelFolderError(f"{folder} has no *.safetensors file")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise ModelFolderError(
            f"{file} ({size:,} bytes) is not a whole safetensors file: {error}; copy or download it again"
        ) from error


def check_tensors(
    family: "Family", config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str
) -> Mapping[str, tuple[int, ...]]:
    """Return the tensors to read. Raise ModelFolderError that names missing, misshapen and unexpected ones."""
    expected = family.tensor_shapes(config, found.keys())
    problems = [f"tensor {name} is missing" for name in expected if name not in found]
    problems += [
        f"tensor {name} has shape {list(found[name])}; config.json requires {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems += [
        f"tensor {name} is unexpected for {config.architecture}"
        for name in found
        if name not in expected and not family.is_ignorable(config, name) and not is_kv_scale(name)
    ]
    refuse_tensors(where, problems)
    return expected


def are_equal(source: TensorSource, first: str, second: str, dtype: torch.dtype) -> bool:
    """Return whether two matrices are equal in a dtype. They are read in parts, only up to the first difference."""
    shapes = source.shapes()
    if shapes[first] != shapes[second]:
        return False
    rows = shapes[first][0]
    for begin in range(0, rows, _COMPARED_ROWS):
        split = Split(dim=0, spans=((begin, min(begin + _COMPARED_ROWS, rows)),))
        one, other = (source.read(name, split=split).to(dtype) for name in (first, second))
        if not torch.equal(one, other):
            return False
    return True


def refuse_tensors(where: str, problems: list[str]) -> None:
    """Raise ModelFolderError with the first of the problems, if there are any."""
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ModelFolderError("\n  - ".join([f"{where} does not fit its config.json:", *shown]))
