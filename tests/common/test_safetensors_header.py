"""Headers of weights from unknown authors: parsed, or rejected at once."""

import json
from time import process_time

import pytest

from quire_common.safetensors_header import NoWeights, count_parameters


def file(*shapes: object) -> bytes:
    tensors = {f"t{place}": {"shape": shape, "data_offsets": [0, 0]} for place, shape in enumerate(shapes)}
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header


def count(data: bytes) -> int:
    return count_parameters(lambda start, size: data[start : start + size], len(data))


def test_element_count_covers_all_tensors() -> None:
    assert count(file([2, 3], [], [4])) == 11


@pytest.mark.parametrize(
    "shape", [[10**4000] * 1000, [2**60], [-1, 2], [1.5], ["a"], [1] * 17, [[1]]], ids=lambda shape: str(shape)[:12]
)
def test_invalid_shape_is_rejected_before_multiplying(shape: object) -> None:
    data, began = file(shape), process_time()
    with pytest.raises(NoWeights, match="invalid shape"):
        count(data)
    assert process_time() - began < 2.0
