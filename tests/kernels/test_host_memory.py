"""Host memory of a swap space: what is asked for and no more, pinned for as long as it is in use."""

from dataclasses import dataclass, field

import pytest
import torch

from quire_kernels.host_memory import lazy_zeros, pinned_zeros


@dataclass
class FakeCudart:
    """Keeps what is registered, by address."""

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


def test_what_is_pinned_is_not_rounded_up_and_is_given_back_with_its_last_view() -> None:
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


def test_memory_that_cannot_be_pinned_is_told_and_let_go() -> None:
    cudart = FakeCudart(error=2)
    with pytest.raises(RuntimeError, match=r"CUDA error: 4,096 bytes of host memory cannot be pinned: out of memory"):
        pinned_zeros((4096,), torch.uint8, cudart)
    assert not cudart.registered


@pytest.mark.parametrize("shape", [(3, 7), (0, 7)])
def test_pages_that_nobody_pinned_are_zeros_to_write_to(shape: tuple[int, ...]) -> None:
    zeros = lazy_zeros(shape, torch.float32)
    assert zeros.shape == shape and not zeros.any()
    zeros.fill_(2.0)
    assert zeros.sum() == 2.0 * zeros.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for a GPU")
def test_a_gpu_takes_pinned_pages_for_its_own() -> None:
    zeros = pinned_zeros((3, 1000), torch.float32)
    assert zeros.is_pinned()
    zeros.fill_(3.0)
    assert torch.equal(zeros.to("cuda", non_blocking=True).cpu(), zeros)
