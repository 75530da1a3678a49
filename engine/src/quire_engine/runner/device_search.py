"""The device that runs the model: one of the GPUs that torch and the driver report, or the CPU.

``device_choice`` decides.
"""

import logging
import os
import warnings
from dataclasses import dataclass

import torch

from quire_common.errors import FlagsError
from quire_engine.config import EngineConfig
from quire_engine.runner.device_choice import FoundDevices, Gpu, NoDevice, OnCpu, OnGpu, choose_device
from quire_kernels.dispatch import runs_triton
from quire_kernels.triton_runtime.target import amd_architecture

_log = logging.getLogger(__name__)
_VISIBLE = ("CUDA_VISIBLE_DEVICES",)
_VISIBLE_TO_HIP = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP reads all three; those of other platforms have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    device: torch.device
    gpu: Gpu | None

    @property
    def name(self) -> str:
        return "the CPU" if self.gpu is None else self.gpu.name

    @property
    def is_interpreted(self) -> bool:
        """True if Triton's kernels run without a GPU."""
        return self.gpu is None and runs_triton(self.device.type)


def find_place(config: EngineConfig) -> Place:
    """Return the device for the model. Raise FlagsError if the requested one is unavailable."""
    options, parallel = config.device, config.parallel
    match choose_device(options.device, find_devices, parallel.local_ranks, needed_by=parallel.flags):
        case NoDevice(message=message):
            raise FlagsError([message])
        case OnGpu(gpu=gpu):
            # Our kernels are launched on the current device.
            torch.cuda.set_device(gpu.index)
            if gpu.amd:
                _log.warning(
                    "%s (%s): quire's kernels are compiled and bounded for this architecture, but have not run on"
                    " a GPU of AMD yet; compare some answers with those of --device cpu",
                    gpu.name,
                    gpu.amd,
                )
            return Place(device=torch.device("cuda", gpu.index), gpu=gpu)
        case OnCpu(reason=reason):
            if options.device == "auto":
                _log.info("running on the CPU: %s", reason)
            return Place(device=torch.device("cpu"), gpu=None)


def find_devices() -> FoundDevices:
    """Return the GPUs that this process may use, or the reason for an empty list."""
    hip: str | None = torch.version.hip
    architectures = tuple(name for name in _architectures() if name.startswith("sm_" if hip is None else "gfx"))
    gpus: tuple[Gpu, ...] = ()
    failure = None
    if architectures:
        try:
            with warnings.catch_warnings():  # warnings about old GPUs and drivers are reported as reasons
                warnings.simplefilter("ignore")
                torch.cuda.init()
                gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as error:
            failure = " ".join(str(error).split()).rstrip(".")
    variables = _VISIBLE if hip is None else _VISIBLE_TO_HIP
    return FoundDevices(
        torch_version=str(torch.__version__),
        hip=hip,
        architectures=architectures,
        visible=tuple((name, os.environ[name]) for name in variables if name in os.environ),
        gpus=gpus,
        failure=failure,
    )


def _architectures() -> list[str]:
    if torch.version.cuda is None and torch.version.hip is None:
        return []
    # get_arch_list() is empty without a GPU.
    return (torch._C._cuda_getArchFlags() or "").split()


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        amd=amd_architecture(index),
        memory_bytes=properties.total_memory,
    )
