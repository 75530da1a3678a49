"""The device on which a model runs, decided from the available ones."""

from dataclasses import replace

import pytest
import torch

from quire_engine.config import DeviceName, DType
from quire_engine.runner.device_choice import (
    FoundDevices,
    Gpu,
    NoDevice,
    OnCpu,
    OnGpu,
    choose_device,
    fp8_weights_problem,
    kv_dtype_problem,
)
from quire_engine.runner.device_search import find_devices

H100 = Gpu(index=0, name="NVIDIA H100", capability=(9, 0), memory_bytes=80 << 30)
T4 = Gpu(index=0, name="Tesla T4", capability=(7, 5), memory_bytes=16 << 30)
GB300 = Gpu(index=0, name="NVIDIA GB300", capability=(10, 3), memory_bytes=280 << 30)
FOUND = FoundDevices(
    torch_version="2.11.0+cu130",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100"),
    visible=None,
    gpus=(H100,),
    failure=None,
)


@pytest.mark.parametrize("asked", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpus", "index"),
    [((H100,), 0), ((T4, replace(H100, index=1)), 1), ((GB300,), 0), ((replace(H100, capability=(8, 9)),), 0)],
)
def test_first_usable_gpu_is_chosen(asked: DeviceName, gpus: tuple[Gpu, ...], index: int) -> None:
    chosen = choose_device(asked, lambda: replace(FOUND, gpus=gpus))
    assert isinstance(chosen, OnGpu) and chosen.gpu.index == index


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replace(FOUND, torch_version="2.11.0+cpu", architectures=()), "torch 2.11.0+cpu is built without CUDA"),
        (replace(FOUND, visible=""), "CUDA_VISIBLE_DEVICES is '', which hides every GPU"),
        (replace(FOUND, visible="-1", gpus=()), "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU"),
        (
            replace(FOUND, gpus=(), failure="Found no NVIDIA driver on your system"),
            "torch 2.11.0+cu130 cannot use a GPU here: Found no NVIDIA driver on your system",
        ),
        (replace(FOUND, gpus=()), "there is no GPU that this process may see"),
        (
            replace(FOUND, gpus=(T4,)),
            "Tesla T4 has compute capability 7.5, and at least 8.0 (Ampere, such as an A100 or A10)",
        ),
        (replace(FOUND, gpus=(T4, replace(T4, index=1))), "is needed"),
        (replace(FOUND, architectures=("sm_80",)), "has compute capability 9.0, and torch 2.11.0+cu130 is built for"),
        (replace(FOUND, gpus=(replace(GB300, capability=(12, 1)),)), "sm_75, sm_80, sm_86, sm_90a, sm_100 only"),
    ],
)
def test_auto_selects_the_cpu_without_a_gpu_and_cuda_is_refused(found: FoundDevices, reason: str) -> None:
    on_cpu = choose_device("auto", lambda: found)
    assert isinstance(on_cpu, OnCpu) and reason in on_cpu.reason, on_cpu
    assert on_cpu.reason.count("compute capability") <= 1, "the same of two GPUs is said once"
    refused = choose_device("cuda", lambda: found)
    assert isinstance(refused, NoDevice)
    assert refused.message == f"--device cuda: {on_cpu.reason}; --device cpu would run without"


def test_cpu_device_does_not_probe_for_gpus() -> None:
    def find() -> FoundDevices:
        raise AssertionError("looked")

    assert isinstance(choose_device("cpu", find), OnCpu)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (None, "needs a GPU, and this engine runs on the CPU"),
        (
            replace(H100, name="NVIDIA A100", capability=(8, 0)),
            "needs compute capability 8.9 (Ada, Hopper), and NVIDIA",
        ),
        (replace(H100, capability=(8, 9)), None),
        (H100, None),
    ],
)
def test_fp8_needs_a_gpu_that_computes_it(gpu: Gpu | None, words: str | None) -> None:
    problem = kv_dtype_problem(gpu)
    assert problem is None if words is None else problem is not None and words in problem


@pytest.mark.parametrize(
    ("gpu", "dtype", "words"),
    [
        (None, "auto", "needs a GPU, and this engine runs on the CPU: use int8"),
        (replace(H100, capability=(8, 6)), "auto", "needs compute capability 8.9 (Ada, Hopper)"),
        (H100, "float16", "computes activations in bfloat16, and --dtype is float16"),
        (H100, "float32", "and --dtype is float32"),
        (replace(H100, capability=(8, 9)), "auto", None),
        (H100, "bfloat16", None),
    ],
)
def test_fp8_weights_need_a_gpu_and_bfloat16(gpu: Gpu | None, dtype: DType, words: str | None) -> None:
    problem = fp8_weights_problem(gpu, dtype)
    assert problem is None if words is None else problem is not None and words in problem


def test_found_devices_agree_with_torch() -> None:
    found = find_devices()
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert bool(found.architectures) is (torch.version.cuda is not None)
    if found.architectures and not torch.cuda.is_available():
        assert found.failure and "\n" not in found.failure
