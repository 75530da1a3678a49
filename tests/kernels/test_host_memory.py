"""Host memory of a swap space: of the requested size, and pinned while it is in use."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import pytest
import torch

from quire_kernels.host_memory import in_large_pages, lazy_zeros, pinned_zeros


@dataclass
class FakeCudart:
    """A CUDA runtime that records registrations by address."""

    error: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"out of memory ({error})"


def test_pinned_memory_is_exact_and_freed_with_its_last_view() -> None:
    cudart = FakeCudart()
    zeros = pinned_zeros((5, 3, 1000), torch.bfloat16, cudart)
    assert zeros.shape == (5, 3, 1000) and zeros.dtype == torch.bfloat16 and not zeros.any()
    assert cudart.registered == {zeros.data_ptr(): 30_000}
    last = zeros[4]
    del zeros
    last.fill_(1.0)
    assert len(cudart.registered) == 1
    del last
    assert not cudart.registered


def test_memory_that_cannot_be_pinned_is_an_error_and_freed() -> None:
    cudart = FakeCudart(error=2)
    with pytest.raises(RuntimeError, match=r"CUDA error: 4,096 bytes of host memory cannot be pinned: out of memory"):
        pinned_zeros((4096,), torch.uint8, cudart)
    assert not cudart.registered


@pytest.mark.parametrize("shape", [(3, 7), (0, 7)])
def test_unpinned_pages_are_writable_zeros(shape: tuple[int, ...]) -> None:
    zeros = lazy_zeros(shape, torch.float32)
    assert zeros.shape == shape and not zeros.any()
    zeros.fill_(2.0)
    assert zeros.sum() == 2.0 * zeros.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for a GPU")
def test_gpu_recognizes_pinned_pages() -> None:
    zeros = pinned_zeros((3, 1000), torch.float32)
    assert zeros.is_pinned()
    zeros.fill_(3.0)
    assert torch.equal(zeros.to("cuda", non_blocking=True).cpu(), zeros)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1000, 1000), (64 << 20,)], ids=str)
def test_a_copy_in_large_pages_has_the_same_numbers(shape: tuple[int, ...]) -> None:
    given = torch.arange(prod(shape), dtype=torch.int32).view(shape)
    copy = in_large_pages(given.t() if given.dim() == 2 else given)
    assert copy.is_contiguous() and (not copy.numel() or copy.data_ptr() != given.data_ptr())
    assert torch.equal(copy, given.t() if given.dim() == 2 else given)


def test_copies_are_aligned_and_do_not_overlap() -> None:
    copies = [in_large_pages(torch.full((size,), size, dtype=torch.int32)) for size in (1, 63, 64, 65, 100_000)]
    assert all((copy == len(copy)).all() for copy in copies)
    assert all(copy.data_ptr() % 64 == 0 for copy in copies)


def test_pages_are_unmapped_with_their_last_copy() -> None:
    first, second = in_large_pages(torch.zeros(33 << 20, dtype=torch.uint8)), in_large_pages(torch.ones(1))
    before = mapped_kib()
    del first
    assert mapped_kib() < before - (32 << 10)
    assert second.item() == 1.0


def mapped_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:"))
    return int(line.split()[1])
