"""The adapters in examples/models/adapters: the engine reads them, and each answers in a style of its own."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_support.folders import linear_shapes

from quire_engine.model.adapters.peft import read_adapter

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
BASE, ADAPTERS = MODELS / "quire-demo", MODELS / "adapters"
STYLES = {
    "polite": ("Certainly. ", "Do you have another question?"),
    "brief": ("In short: ", "."),
}
"""The beginning and the end of every answer."""
MAX_BYTES = 300_000


def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ADAPTERS / "training.json").read_text())
    return content


@pytest.mark.parametrize("name", STYLES)
def test_adapter_is_small_and_matches_its_record(name: str) -> None:
    weights = (ADAPTERS / name / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record()[name]["weights_sha256"]
    assert len(weights) <= MAX_BYTES


def test_adapters_were_trained_on_this_demo_model() -> None:
    assert record()["base_sha256"] == hashlib.sha256((BASE / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", STYLES)
def test_recorded_answers_are_in_the_style_of_the_adapter(name: str) -> None:
    begin, end = STYLES[name]
    answers = [sample["answer"] for sample in record()[name]["samples"]]
    assert len(answers) == 5
    for answer in answers:
        assert answer.startswith(begin) and answer.endswith(end), answer


@pytest.mark.parametrize("name", STYLES)
def test_the_engine_reads_each_adapter_for_every_linear_layer(name: str) -> None:
    shapes = linear_shapes(BASE)
    found = read_adapter(ADAPTERS / name, shapes, max_rank=8, dtype=torch.float32)
    assert found.rank == 4
    assert set(found.modules) == set(shapes)
    assert all(module.b.any() for module in found.modules.values())
