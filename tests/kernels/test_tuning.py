"""The search for launch configurations with synthetic costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.tuning import Parameters, Trials, by_share, merged, search

SPACE = {"BLOCK": (16, 32, 64), "num_warps": (1, 2, 4)}
START = {"BLOCK": 16, "num_warps": 4}
MACHINE = {"device": "a GPU"}


def cost(parameters: Parameters) -> float | None:
    """Return a cost that is least at 64, 2; 32 cannot be used with more than one warp."""
    if parameters["BLOCK"] == 32 and parameters["num_warps"] > 1:
        return None
    return 1.0 + abs(parameters["BLOCK"] - 64) / 64 + abs(parameters["num_warps"] - 2)


def never() -> bool:
    return False


def test_best_config_is_found_and_unusable_ones_are_skipped() -> None:
    found = search(SPACE, START, cost, never)
    assert found.best == {"BLOCK": 64, "num_warps": 2} and found.seconds == 1.0
    assert found.default_seconds == 3.75 and found.finished and found.worth_writing


def test_a_default_that_cannot_be_used_is_replaced() -> None:
    found = search(SPACE, {"BLOCK": 32, "num_warps": 4}, cost, never)
    assert found.default_seconds is None and found.seconds == 1.0 and found.worth_writing


def test_nothing_is_written_without_a_usable_configuration() -> None:
    found = search(SPACE, START, lambda parameters: None, never)
    assert found.seconds is None and not found.worth_writing and found.best == START


def test_negligible_gain_keeps_the_default() -> None:
    found = search(SPACE, START, lambda parameters: 1.0 if parameters == START else 0.99, never)
    assert not found.worth_writing


def test_best_configuration_so_far_is_kept_at_the_time_limit() -> None:
    left = iter([False, False, True])
    found = search(SPACE, START, cost, lambda: next(left))
    assert not found.finished and found.best == {"BLOCK": 64, "num_warps": 4}


def test_interrupted_search_continues_without_repetition(tmp_path: Path) -> None:
    tried: list[dict[str, int]] = []

    def counted(parameters: Parameters) -> float | None:
        tried.append(dict(parameters))
        return cost(parameters)

    path = tmp_path / "state" / "gpu.json"
    left = iter([False] * 3 + [True])
    search(SPACE, START, Trials.read(path, MACHINE).remembered("op.k", "wide", counted), lambda: next(left))
    found = search(SPACE, START, Trials.read(path, MACHINE).remembered("op.k", "wide", counted), never)
    assert found.best == {"BLOCK": 64, "num_warps": 2}
    assert len(tried) == len({json.dumps(parameters) for parameters in tried})
    again = len(tried)
    search(SPACE, START, Trials.read(path, MACHINE).remembered("op.k", "wide", counted), never)
    assert len(tried) == again


def test_results_of_other_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Trials.read(path, MACHINE).remembered("op.k", "wide", cost)(START)
    assert Trials.read(path, MACHINE).seconds["op.k"]["wide"]
    assert Trials.read(path, {"device": "another"}).seconds == {}


@pytest.mark.parametrize(
    ("table", "kernels"),
    [
        (None, {"op.k": {"wide": {"BLOCK": 32}}}),
        ({"device": "x", "kernels": {"op.k": {"wide": {"BLOCK": 1}}}}, {"op.k": {"wide": {"BLOCK": 32}}}),
        (
            {"kernels": {"op.k": {"narrow": {"BLOCK": 1}}, "a.b": {"default": {"BLOCK": 2}}}},
            {"a.b": {"default": {"BLOCK": 2}}, "op.k": {"narrow": {"BLOCK": 1}, "wide": {"BLOCK": 32}}},
        ),
    ],
)
def test_a_table_keeps_its_other_entries(table: dict[str, Any] | None, kernels: dict[str, Any]) -> None:
    result = merged(table, "op.k", "wide", {"BLOCK": 32})
    assert result["kernels"] == kernels
    assert table is None or result.get("device") == table.get("device")


def test_kernels_with_the_largest_share_are_tuned_first() -> None:
    kernels = [
        "activation.gated",
        "paged_attention.attend",
        "swap_blocks.swap",
        "linear.multiply",
        "paged_attention.split",
    ]
    ordered = sorted([(kernel, key) for kernel in kernels for key in ("b", "a")], key=by_share)
    assert [kernel for kernel, _ in ordered[::2]] == [kernels[place] for place in (4, 3, 1, 0, 2)]
    assert [key for _, key in ordered] == ["a", "b"] * 5
