"""The GPUs that this process may use, or the reason for an empty list, as torch and the driver report.

``device_choice`` decides.
"""

import os
import warnings

import torch

from quire_engine.runner.device_choice import FoundDevices, Gpu


def find_devices() -> FoundDevices:
    architectures = tuple(name for name in _architectures() if name.startswith("sm_"))
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
    return FoundDevices(
        torch_version=str(torch.__version__),
        architectures=architectures,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus,
        failure=failure,
    )


def _architectures() -> list[str]:
    if torch.version.cuda is None:
        return []
    # get_arch_list() is empty without a GPU.
    return (torch._C._cuda_getArchFlags() or "").split()


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
    )
