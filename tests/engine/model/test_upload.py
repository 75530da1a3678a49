"""The upload of tensors to the device through two buffers, of which one is filled while the other is copied."""

from dataclasses import dataclass, field

import pytest
import torch

from quire_engine.model.upload import StagedUpload, make_upload

CHUNK = 64


@dataclass
class FakeEvent:
    """An event that records its use; like CUDA's, it may be waited for before it was recorded."""

    log: list[str] = field(default_factory=list)

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 2), (7, 9, 11), (0, 4)])
def test_uploaded_tensor_is_unchanged(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    events = (FakeEvent(), FakeEvent())
    buffers = tuple(torch.empty(CHUNK, dtype=torch.uint8) for _ in events)
    upload = StagedUpload(torch.device("cpu"), buffers, events)
    first, second = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    found = [upload(first), upload(second)]
    assert all(torch.equal(*pair) for pair in zip(found, (first, second), strict=True))
    assert found[0].data_ptr() != first.data_ptr() or first.numel() == 0


def test_staging_buffer_is_reused_only_after_its_copy() -> None:
    events = (FakeEvent(), FakeEvent())
    buffers = tuple(torch.empty(CHUNK, dtype=torch.uint8) for _ in events)
    upload = StagedUpload(torch.device("cpu"), buffers, events)
    upload(torch.zeros(3 * CHUNK + 1, dtype=torch.uint8))  # four chunks
    upload(torch.zeros(1, dtype=torch.uint8))  # continues with the first buffer
    assert events[0].log == ["wait", "record"] * 3
    assert events[1].log == ["wait", "record"] * 2


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.randn(3)
    assert make_upload(torch.device("cpu"))(tensor) is tensor
