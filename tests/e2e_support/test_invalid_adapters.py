"""Each invalid adapter of the scenarios is refused by the engine for the reason that its name promises."""

from pathlib import Path

import pytest
import torch
from adapter_support.folders import linear_shapes

from e2e_support.adapters import invalid_folders
from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.errors import AdapterError
from quire_engine.model.adapters.peft import read_adapter

MODELS = Path(__file__).parents[2] / "examples" / "models"
REASONS = {
    "wrong-base": AdapterFailure.WRONG_BASE,
    "rank-too-high": AdapterFailure.RANK_TOO_HIGH,
    "pickled": AdapterFailure.INVALID,
    "truncated": AdapterFailure.INVALID,
}


@pytest.mark.parametrize("name", REASONS)
def test_folder_is_refused_for_its_reason(name: str, tmp_path: Path) -> None:
    for file, content in invalid_folders(MODELS / "adapters" / "polite")[name].items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(AdapterError) as refused:
        read_adapter(tmp_path, linear_shapes(MODELS / "quire-demo"), max_rank=8, dtype=torch.float32)
    assert refused.value.reason is REASONS[name]
