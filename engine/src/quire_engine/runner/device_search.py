"""The GPUs that this process may use, or the reason for an empty list, as torch and the driver report.

``device_choice`` decides.
"""

import os
import warnings

import torch

from quire_engine.runner.device_choice import FoundDevices, Gpu
from quire_kernels.triton_runtime.target import amd_architecture

_VISIBLE = ("CUDA_VISIBLE_DEVICES",)
_VISIBLE_TO_HIP = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP reads all three; those of other platforms have no effect."""


def find_devices() -> FoundDevices:
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
