"""The device on which a model runs, decided from the available ones."""

from dataclasses import replace
from types import SimpleNamespace

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
MI300X = Gpu(index=0, name="AMD Instinct MI300X", capability=(9, 4), amd="gfx942", memory_bytes=192 << 30)
MI355X = replace(MI300X, name="AMD Instinct MI355X", capability=(9, 5), amd="gfx950")
MI250X = replace(MI300X, name="AMD Instinct MI250X", capability=(9, 0), amd="gfx90a")
T4 = Gpu(index=0, name="Tesla T4", capability=(7, 5), memory_bytes=16 << 30)
GB300 = Gpu(index=0, name="NVIDIA GB300", capability=(10, 3), memory_bytes=280 << 30)
FOUND = FoundDevices(
    torch_version="2.11.0+cu130",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100"),
    gpus=(H100,),
    failure=None,
)
ON_AMD = FoundDevices(
    torch_version="2.11.0+rocm7.1",
    architectures=("gfx90a", "gfx942", "gfx950"),
    hip="7.1.25424",
    gpus=(MI300X,),
    failure=None,
)
ON_CPU = replace(FOUND, torch_version="2.11.0+cpu", architectures=(), gpus=())
HIDDEN = (("CUDA_VISIBLE_DEVICES", ""),)


@pytest.mark.parametrize("asked", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpus", "index"),
    [((H100,), 0), ((T4, replace(H100, index=1)), 1), ((GB300,), 0), ((replace(H100, capability=(8, 9)),), 0)],
)
def test_first_usable_gpu_is_chosen(asked: DeviceName, gpus: tuple[Gpu, ...], index: int) -> None:
    chosen = choose_device(asked, lambda: replace(FOUND, gpus=gpus))
    assert isinstance(chosen, OnGpu) and chosen.gpu.index == index


@pytest.mark.parametrize("asked", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpus", "count", "indices"),
    [
        ((H100, replace(H100, index=1), replace(H100, index=2)), 2, (0, 1)),
        ((T4, replace(H100, index=1), replace(H100, index=2)), 2, (1, 2)),
        ((GB300, replace(H100, index=1), replace(H100, index=2)), 2, (1, 2)),
    ],
)
def test_ranks_get_gpus_of_one_kind(
    asked: DeviceName, gpus: tuple[Gpu, ...], count: int, indices: tuple[int, ...]
) -> None:
    chosen = choose_device(asked, lambda: replace(FOUND, gpus=gpus), count)
    assert isinstance(chosen, OnGpu) and (chosen.gpu.index, *(gpu.index for gpu in chosen.others)) == indices


@pytest.mark.parametrize("asked", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            FOUND,
            "--tensor-parallel-size 4 needs 4 GPUs of one kind on this machine, and this process may use 1 × NVIDIA"
            " H100: leave it out, give the process more GPUs, or use --device cpu",
        ),
        (
            replace(
                FOUND,
                visible=(("CUDA_VISIBLE_DEVICES", "0,1,2"),),
                gpus=(H100, replace(H100, index=1), replace(GB300, index=2)),
            ),
            "--tensor-parallel-size 4 needs 4 GPUs of one kind on this machine, and this process may use 2 × NVIDIA"
            " H100 and 1 × NVIDIA GB300 (CUDA_VISIBLE_DEVICES is '0,1,2'): use at most 2 ranks on a machine, give the"
            " process more GPUs, or use --device cpu",
        ),
    ],
)
def test_too_few_gpus_are_an_error_with_the_remedy(asked: DeviceName, found: FoundDevices, message: str) -> None:
    chosen = choose_device(asked, lambda: found, 4, needed_by="--tensor-parallel-size 4")
    assert chosen == NoDevice(message=message)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replace(FOUND, visible=HIDDEN), "CUDA_VISIBLE_DEVICES is '', which hides every GPU"),
        (
            replace(FOUND, visible=(("CUDA_VISIBLE_DEVICES", "-1"),), gpus=()),
            "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU",
        ),
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


@pytest.mark.parametrize("asked", ["auto", "rocm"])
@pytest.mark.parametrize(
    ("gpus", "index"),
    [((MI300X,), 0), ((MI250X, replace(MI300X, index=1)), 1), ((MI355X,), 0)],
)
def test_amd_gpus_are_chosen_by_architecture(asked: DeviceName, gpus: tuple[Gpu, ...], index: int) -> None:
    chosen = choose_device(asked, lambda: replace(ON_AMD, gpus=gpus))
    assert isinstance(chosen, OnGpu) and chosen.gpu.index == index


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            replace(ON_AMD, visible=(("HIP_VISIBLE_DEVICES", "-1"),)),
            "HIP_VISIBLE_DEVICES is '-1', which hides every GPU",
        ),
        (replace(ON_AMD, gpus=(), failure="No HIP GPUs are available"), "here: No HIP GPUs are available"),
        (replace(ON_AMD, gpus=()), "there is no GPU that this process may see (rocm-smi lists those of the machine)"),
        (
            replace(ON_AMD, gpus=(MI250X,)),
            "AMD Instinct MI250X has architecture gfx90a, and the kernels are compiled for gfx942, gfx950, gfx1100",
        ),
        (
            replace(ON_AMD, architectures=("gfx90a",)),
            "has architecture gfx942, and torch 2.11.0+rocm7.1 is built for gfx90a only",
        ),
    ],
)
def test_without_a_usable_amd_gpu_rocm_is_refused(found: FoundDevices, reason: str) -> None:
    on_cpu = choose_device("auto", lambda: found)
    assert isinstance(on_cpu, OnCpu) and reason in on_cpu.reason
    refused = choose_device("rocm", lambda: found)
    assert refused == NoDevice(message=f"--device rocm: {on_cpu.reason}; --device cpu would run without")


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        (
            "cuda",
            ON_AMD,
            "--device cuda: torch 2.11.0+rocm7.1 is built for AMD (HIP 7.1.25424): use --device rocm",
        ),
        (
            "rocm",
            FOUND,
            "--device rocm: torch 2.11.0+cu130 is built for NVIDIA (CUDA): use --device cuda, or install torch's"
            " build for ROCm",
        ),
        (
            "rocm",
            ON_CPU,
            "--device rocm: torch 2.11.0+cpu is built without CUDA and without ROCm: install torch's build for ROCm;"
            " --device cpu would run without",
        ),
        (
            "cuda",
            ON_CPU,
            "--device cuda: torch 2.11.0+cpu is built without CUDA and without ROCm: install torch's build for CUDA;"
            " --device cpu would run without",
        ),
    ],
)
def test_another_build_of_torch_is_named(asked: DeviceName, found: FoundDevices, message: str) -> None:
    assert choose_device(asked, lambda: found) == NoDevice(message=message)


def test_auto_runs_on_the_cpu_with_torch_for_cpus() -> None:
    assert choose_device("auto", lambda: ON_CPU) == OnCpu(
        reason="torch 2.11.0+cpu is built without CUDA and without ROCm"
    )


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
        (MI300X, "converts float8 e4m3fn (gfx950), and AMD Instinct MI300X (gfx942) has another float8: use auto"),
        (MI355X, None),
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
        (MI355X, "auto", "is for GPUs of NVIDIA in this version, and the model runs on AMD Instinct MI355X"),
        (replace(H100, capability=(8, 9)), "auto", None),
        (H100, "bfloat16", None),
    ],
)
def test_fp8_weights_need_a_gpu_and_bfloat16(gpu: Gpu | None, dtype: DType, words: str | None) -> None:
    problem = fp8_weights_problem(gpu, dtype)
    assert problem is None if words is None else problem is not None and words in problem


def test_a_hip_build_of_torch_is_searched_for_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", total_memory=192 << 30
    )
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "gfx90a gfx942", raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    found = find_devices()
    assert found == FoundDevices(
        torch_version=str(torch.__version__),
        architectures=("gfx90a", "gfx942"),
        hip="7.1.25424",
        visible=(("HIP_VISIBLE_DEVICES", "0"),),
        gpus=(MI300X,),
        failure=None,
    )


def test_found_devices_agree_with_torch() -> None:
    found = find_devices()
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert bool(found.architectures) is (torch.version.cuda is not None or torch.version.hip is not None)
    assert found.hip == torch.version.hip
    if found.architectures and not torch.cuda.is_available():
        assert found.failure and "\n" not in found.failure
