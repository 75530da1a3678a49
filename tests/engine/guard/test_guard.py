"""The guard itself: it detects doubled costs, and its message helps."""

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_guard import bounds
from quire_guard.counting import allocated, compilations, native_calls, page_faults, python_cost, torch_operators
from quire_guard.ratios import least_ratio
from quire_guard.scenarios import BLOCK, scheduler_steps

RECORDED = bounds.read()
SAME = bounds.Recorded(python=bounds.python_version(), measures=RECORDED.measures)
OTHER = bounds.Recorded(python="3.0", measures=RECORDED.measures)


@pytest.mark.parametrize("recorded", [SAME, OTHER], ids=["recorded with this Python", "with another"])
@pytest.mark.parametrize("name", RECORDED.measures["counts"])
def test_doubled_count_is_detected(name: str, recorded: bounds.Recorded) -> None:
    before = recorded.measures["counts"][name]
    assert bounds.excess("counts", name, before, recorded) is None
    problem = bounds.excess("counts", name, 2 * before, recorded)
    assert problem is not None and f"from {before:.6g} to {2 * before:.6g}" in problem and bounds.RENEW in problem


@pytest.mark.parametrize("name", RECORDED.measures["ratios"])
def test_tripled_ratio_is_detected(name: str) -> None:
    before = RECORDED.measures["ratios"][name]
    assert bounds.excess("ratios", name, 2 * before, SAME) is None
    assert bounds.excess("ratios", name, 3 * before, SAME) is not None


@pytest.mark.parametrize("name", RECORDED.measures["amounts"])
def test_allocation_of_a_megabyte_per_step_is_detected(name: str) -> None:
    pages = 2**20 // mmap.PAGESIZE
    assert bounds.excess("amounts", name, RECORDED.measures["amounts"][name] + pages, SAME) is not None


def test_measurement_without_a_bound_names_the_renew_command() -> None:
    problem = bounds.excess("counts", "something new", 1.0, SAME)
    assert problem is not None and "no bound yet" in problem and bounds.RENEW in problem


def test_renewed_bounds_equal_the_measurements(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    bounds.write({"counts": {"one": 1.25}}, file)
    assert bounds.read(file) == bounds.Recorded(python=bounds.python_version(), measures={"counts": {"one": 1.25}})


def test_counts_are_proportional_to_steps() -> None:
    steps = scheduler_steps(4)

    def twice() -> None:
        steps()
        steps()

    for count in (lambda work: python_cost(work).instructions, lambda work: sum(python_cost(work).calls.values())):
        assert count(steps) == count(steps) == count(twice) / 2
    assert native_calls(steps) == native_calls(steps) == native_calls(twice) / 2


def test_instructions_grow_with_the_number_of_sequences() -> None:
    assert python_cost(scheduler_steps(5)).instructions >= python_cost(scheduler_steps(4)).instructions + 50 * BLOCK


def test_torch_operators_are_counted_one_by_one() -> None:
    x = torch.ones(4)

    def work() -> None:
        for _ in range(3):
            torch.add(x, x)

    assert torch_operators(work) == {"aten.add.Tensor": 3}


def test_a_compilation_is_counted() -> None:
    from numba import njit

    function: Callable[[int], int] = njit(lambda x: x + 1)
    assert compilations(lambda: function(1)) > 0
    assert compilations(lambda: function(2)) == 0


def test_page_faults_of_each_step_are_counted() -> None:
    def fresh_memory() -> None:
        with mmap.mmap(-1, 2**20) as pages:
            for place in range(0, len(pages), mmap.PAGESIZE):
                pages[place] = 1

    assert page_faults(fresh_memory) >= 2**20 // mmap.PAGESIZE


def test_memory_that_is_kept_or_held_at_a_time_is_counted() -> None:
    kept: list[bytes] = []

    def keep() -> None:
        kept.extend(bytes(1000) for _ in range(500))
        bytearray(2**20)

    found = allocated(keep)
    assert found.kept_blocks >= 500 and found.peak_bytes >= 2**20


def test_work_that_doubles_doubles_its_ratio() -> None:
    numbers = list(range(20_000))

    def once() -> None:
        sorted(numbers, key=str)

    def twice() -> None:
        once()
        once()

    assert 1.4 < least_ratio(twice, once) < 3.0
