"""The switch between spinning and sleeping waits of torch's OpenMP threads."""

import os
import sys
import threading

import pytest

from quire_kernels.cpu_runtime.spin_switch import SpinSwitch


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def sleepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "openmp-sleepers"}


def test_repeated_switch_has_no_further_effect() -> None:
    before = sleepers()  # of engines from other tests in this process
    switch = SpinSwitch(threads=2)
    switch.spin()
    assert sleepers() <= before
    switch.sleep()
    switch.sleep()
    assert len(sleepers() - before) == 1
    switch.spin()
    switch.spin()
    assert sleepers() <= before


def test_number_of_sleeping_threads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many threads would end the process, because libgomp exits if it cannot create them."""
    before = sleepers()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    switch = SpinSwitch(threads=2)
    switch.sleep()
    assert sleepers() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings libgomp on Linux")
def test_more_threads_than_cpus_are_managed_while_threads_sleep() -> None:
    """The threads of this process show libgomp's rule from outside."""
    compute_threads = 2
    cpus = len(os.sched_getaffinity(0))
    before = _threads()
    switch = SpinSwitch(compute_threads)
    switch.sleep()
    try:
        # One is the thread that owns the team, which libgomp does not count.
        begun = _threads() - before
        assert compute_threads + len(begun) - 1 > cpus
    finally:
        switch.spin()
    # A team's threads end after their creator, as soon as they get a core.
    while begun & _threads():
        os.sched_yield()
