"""Spinning or sleeping of compute threads while they wait for each other."""

from pathlib import Path

import pytest

from quire_engine.runner.waiting import Wait, Waits, next_wait, seconds_in_run_queues

SPINS = Wait(spinning=True, since=100.0)
SLEEPS = Wait(spinning=False, since=100.0)


@pytest.mark.parametrize(
    ("name", "before", "queued_share", "now", "after"),
    [
        ("alone on the machine", SPINS, 0.02, 200.0, SPINS),
        ("next to the API process under load", SPINS, 0.2, 200.0, SPINS),
        ("next to a busy process", SPINS, 0.4, 200.0, Wait(spinning=False, since=200.0)),
        (
            "a trial that failed at once: the next one later",
            SPINS,
            0.4,
            100.1,
            Wait(spinning=False, since=100.1, patience_seconds=2.0),
        ),
        (
            "trials are a minute apart at most",
            Wait(spinning=True, since=100.0, patience_seconds=50.0),
            0.4,
            100.1,
            Wait(spinning=False, since=100.1, patience_seconds=60.0),
        ),
        ("not long enough asleep", SLEEPS, 0.0, 100.9, SLEEPS),
        ("still a neighbour", SLEEPS, 0.15, 130.0, SLEEPS),
        ("the neighbour has gone", SLEEPS, 0.05, 101.0, Wait(spinning=True, since=101.0)),
    ],
)
def test_threads_spin_while_cores_are_available(
    name: str, before: Wait, queued_share: float, now: float, after: Wait
) -> None:
    assert next_wait(before, queued_share=queued_share, now=now) == after


class FakeSwitch:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def spin(self) -> None:
        self.calls.append("spin")

    def sleep(self) -> None:
        self.calls.append("sleep")


class Machine:
    """A clock, and the time that two threads have spent in run queues."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queued: float | None = 0.0

    def waits(self, switch: FakeSwitch) -> Waits:
        return Waits(switch, threads=2, queued_seconds=lambda: self.queued, clock=lambda: self.now)

    def work(self, waits: Waits, *, seconds: float, share: float) -> None:
        """Run steps of 10 ms."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            if self.queued is not None:
                self.queued += 0.01 * 2 * share
            waits.poll()


def test_waiting_mode_follows_a_neighbour_process() -> None:
    machine, switch = Machine(), FakeSwitch()
    waits = machine.waits(switch)
    machine.work(waits, seconds=2.0, share=0.05)
    assert waits.spinning and switch.calls == []
    machine.work(waits, seconds=2.0, share=0.5)
    assert not waits.spinning and switch.calls == ["sleep"]
    machine.work(waits, seconds=2.0, share=0.0)
    assert waits.spinning and switch.calls == ["sleep", "spin"]


def test_spinning_trials_back_off_if_a_neighbour_returns() -> None:
    """Sleeping threads wake before a neighbour's slice ends, so the accounts show little of it."""
    machine, switch = Machine(), FakeSwitch()
    waits = machine.waits(switch)
    spun = 0
    for _ in range(1_200):
        machine.work(waits, seconds=0.1, share=0.5 if waits.spinning else 0.02)
        spun += waits.spinning
    assert spun <= 12  # tenths of a second in two minutes
    assert switch.calls[:4] == ["sleep", "spin", "sleep", "spin"]


def test_threads_sleep_without_scheduler_accounting() -> None:
    machine, switch = Machine(), FakeSwitch()
    machine.queued = None
    waits = machine.waits(switch)
    machine.work(waits, seconds=5.0, share=0.0)
    assert not waits.spinning and switch.calls == ["sleep"]
    waits.close()
    assert switch.calls == ["sleep", "spin"]  # as before


def test_ended_thread_is_removed_from_the_account() -> None:
    machine, switch = Machine(), FakeSwitch()
    machine.queued = 50.0
    waits = machine.waits(switch)
    machine.queued = 1.0
    machine.work(waits, seconds=0.2, share=0.0)
    assert waits.spinning


def test_the_account_is_the_sum_over_threads(tmp_path: Path) -> None:
    for name, text in (("7", "500 1000000000 3\n"), ("8", "500 500000000 3\n"), ("9", "odd\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()  # it ended in between
    assert seconds_in_run_queues(tmp_path) == 1.5
    (tmp_path / "uncounted" / "7").mkdir(parents=True)
    (tmp_path / "uncounted" / "7" / "schedstat").write_text("0 0 0\n")  # a kernel without these counters
    assert seconds_in_run_queues(tmp_path / "uncounted") is None
    assert seconds_in_run_queues(tmp_path / "none") is None
    assert seconds_in_run_queues(tmp_path / "10") is None
