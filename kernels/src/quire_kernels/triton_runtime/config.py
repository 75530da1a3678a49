"""Warps, stages and block sizes of every kernel, from tables; no kernel is tuned at run time.

``configs/<op>.json`` contains an op's defaults by family of GPUs. ``configs/devices/<device>.json`` contains what was
measured on one device, and takes precedence. ``QUIRE_KERNEL_CONFIGS`` names a folder with further device files, which
take precedence over the package's. An op's file:

    {"decode": {"default":      {"any":   {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
                                 "sm_90": {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}},
                "head_dim=256": {"any":   {"BLOCK_N": 16, "num_warps": 4, "num_stages": 2}}}}

Every configuration of a kernel has the parameters of its first one, the default for any GPU.
A device's file contains ``{"device": …, "capability": …, "kernels": {"<op>.<kernel>": {key: configuration}}}``.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire_kernels.errors import KernelError
from quire_kernels.triton_runtime.target import Target

FOLDER = Path(__file__).with_name("configs")
DEFAULT = "default"
ANY = "any"
FAMILIES = (ANY, "interpreter", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "amd")
_FAMILY_BY_CAPABILITY = {0: "interpreter", 80: "sm_80", 86: "sm_86", 87: "sm_80", 89: "sm_86"}


class ConfigError(KernelError, ValueError):
    """An invalid table; the message names the file, the place in it, and what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """A launch configuration. ``blocks`` are constexprs by the kernel's own names.

    ``kernel[grid](..., **config.options)`` passes all three.
    """

    num_warps: int
    num_stages: int
    blocks: Mapping[str, int]

    @property
    def options(self) -> dict[str, int]:
        return {**self.blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


Table = Mapping[str, Mapping[str, LaunchConfig]]
"""The configurations of a kernel: key -> family -> configuration."""


def family(target: Target) -> str:
    """Return the family whose defaults a GPU uses: that of its generation, if its shared memory is as large."""
    capability = target.capability
    if target.amd:
        return "amd"
    if capability in _FAMILY_BY_CAPABILITY:
        return _FAMILY_BY_CAPABILITY[capability]
    if capability < 120:
        return "sm_100" if capability >= 100 else "sm_90" if capability >= 90 else "sm_80"
    return "sm_120"


def config_for(kernel: str, target: Target, key: str = DEFAULT) -> LaunchConfig:
    """Return the configuration of ``kernel`` ("<op>.<kernel>"): the device's, else its family's, else the default.

    key  what the best configuration depends on, in the op's own notation, such as "head_dim=128 group=4". It must not
         depend on the composition of the batch, or a row's result would depend on the other rows. A key that no table
         contains gets "default".

    Raise ConfigError for an invalid table or an unknown kernel.
    """
    asked = (kernel, target, key)
    found = _known.get(asked)
    if found is None:
        found = _known[asked] = _look_up(kernel, target, key)
    return found


_known: dict[tuple[str, Target, str], LaunchConfig] = {}
_listeners: list[Callable[[], None]] = []


def forget() -> None:
    """Read the tables again; for tests."""
    _known.clear()
    op_tables.cache_clear()
    _device_configs.cache_clear()
    for listener in _listeners:
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever ``config_for`` may return another result."""
    _listeners.append(listener)


def _look_up(kernel: str, target: Target, key: str) -> LaunchConfig:
    op, _, name = kernel.partition(".")
    tables = op_tables(op)
    if name not in tables:
        raise ConfigError(f"{FOLDER / f'{op}.json'}: has no kernel {name!r}; it has {', '.join(sorted(tables))}")
    shared, of_device = tables[name], _device_configs(target.device_name).get(kernel, {})
    default = _of_family(shared[DEFAULT], target)
    for config in (of_device.get(key), _of_family(shared.get(key, {}), target), of_device.get(DEFAULT), default):
        if config is not None:
            return config
    raise AssertionError("a table without a default is refused on reading")


def _of_family(configs: Mapping[str, LaunchConfig], target: Target) -> LaunchConfig | None:
    return configs.get(family(target), configs.get(ANY))


@functools.cache
def op_tables(op: str) -> Mapping[str, Table]:
    """Return an op's defaults, by kernel."""
    return read_op_tables(FOLDER / f"{op}.json")


def read_op_tables(path: Path) -> Mapping[str, Table]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; every op with a Triton kernel has one")
    return {name: _kernel_table(f"{path}: {name}", table) for name, table in _mapping(str(path), _read(path)).items()}


def _kernel_table(where: str, table: Any) -> Table:
    by_key = {key: _mapping(f"{where}: {key}", families) for key, families in _mapping(where, table).items()}
    default = by_key.get(DEFAULT, {}).get(ANY)
    if default is None:
        raise ConfigError(f"{where}: lacks {DEFAULT!r} for {ANY!r}, which every other GPU and key falls back on")
    names = _mapping(f"{where}: {DEFAULT}: {ANY}", default)
    for key, families in by_key.items():
        for name in families:
            if name not in FAMILIES:
                raise ConfigError(f"{where}: {key}: {name!r} is no family; there are {', '.join(FAMILIES)}")
    return {
        key: {name: _config(f"{where}: {key}: {name}", config, names) for name, config in families.items()}
        for key, families in by_key.items()
    }


def device_file_name(device_name: str) -> str:
    """Return a device's file name: "NVIDIA H200" -> "NVIDIA_H200.json"."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device_name).strip("_") + ".json"


@functools.cache
def _device_configs(device_name: str | None) -> Mapping[str, Mapping[str, LaunchConfig]]:
    """Return the configurations tuned on one device: kernel -> key -> configuration."""
    if device_name is None:
        return {}
    folders = [FOLDER / "devices"]
    if own := os.environ.get("QUIRE_KERNEL_CONFIGS"):
        folders.insert(0, Path(own))
    path = next((path for folder in folders if (path := folder / device_file_name(device_name)).is_file()), None)
    if path is None:
        return {}
    configs: dict[str, Mapping[str, LaunchConfig]] = {}
    for kernel, by_key in _mapping(f"{path}: kernels", _mapping(str(path), _read(path)).get("kernels")).items():
        op, _, name = kernel.partition(".")
        tables = op_tables(op)
        if name not in tables:
            raise ConfigError(f"{path}: kernels: {kernel}: no such kernel; {op} has {', '.join(sorted(tables))}")
        names = tables[name][DEFAULT][ANY].options
        configs[kernel] = {
            key: _config(f"{path}: kernels: {kernel}: {key}", config, names)
            for key, config in _mapping(f"{path}: kernels: {kernel}", by_key).items()
        }
    return configs


def launch_config(parameters: Mapping[str, int]) -> LaunchConfig:
    """Return a configuration from the flat form of the tables."""
    blocks = {name: value for name, value in parameters.items() if name not in ("num_warps", "num_stages")}
    return LaunchConfig(
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"], blocks=MappingProxyType(blocks)
    )


def _config(where: str, config: Any, names: Collection[str]) -> LaunchConfig:
    """Return the configuration with exactly the parameters ``names``."""
    parameters = _mapping(where, config)
    if missing := [
        name for name in {**dict.fromkeys(names), "num_warps": 0, "num_stages": 0} if name not in parameters
    ]:
        raise ConfigError(f"{where}: lacks {', '.join(missing)}")
    if unknown := [name for name in parameters if name not in names]:
        raise ConfigError(f"{where}: has {', '.join(unknown)}, which it should not; its fields are {', '.join(names)}")
    for name, value in parameters.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {name}: is {value!r}; a whole number of at least 1 is needed")
        if name == "num_warps" and value not in (1, 2, 4, 8, 16, 32):
            raise ConfigError(f"{where}: {name}: is {value}; a power of two up to 32 is needed")
        if name == "num_stages" and value > 8:
            raise ConfigError(f"{where}: {name}: is {value}; at most 8 is needed")
    return launch_config(parameters)


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: is {value!r}; an object is needed")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
