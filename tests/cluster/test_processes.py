"""Processes by name: their life cycle and identity, and that none of them outlives its run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_ends import process_ends

from quire_cluster.errors import ComponentFailed
from quire_cluster.guard import birth_of, kill_all
from quire_cluster.processes import Process

SLEEPER = [sys.executable, "-c", "import signal; print('started', flush=True); signal.pause()"]
TREE = str(Path(__file__).parent)


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    process = Process("sleeper", lambda: SLEEPER, tmp_path)
    process.start()
    yield process
    process.kill()


def test_killed_process_can_be_started_again(sleeper: Process) -> None:
    first = sleeper.pid
    sleeper.kill()
    assert sleeper.pid is None
    sleeper.start()
    assert sleeper.pid not in (None, first)


def test_killing_a_stopped_process_is_not_an_error(sleeper: Process) -> None:
    sleeper.kill()
    sleeper.kill()


def test_a_second_start_is_refused(sleeper: Process) -> None:
    with pytest.raises(ComponentFailed, match=f"sleeper runs already, as process {sleeper.pid}"):
        sleeper.start()


def test_a_later_run_finds_the_process_by_its_folder(sleeper: Process, tmp_path: Path) -> None:
    assert Process("sleeper", lambda: SLEEPER, tmp_path).pid == sleeper.pid


def test_a_paused_process_still_runs_and_can_be_killed(sleeper: Process) -> None:
    pid = sleeper.pid
    assert pid is not None
    sleeper.pause()
    assert sleeper.pid == pid
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    sleeper.kill()
    assert birth_of(pid) is None


def test_process_with_a_reused_pid_is_not_killed(sleeper: Process, tmp_path: Path) -> None:
    (tmp_path / "stranger.pid").write_text(f"{sleeper.pid} 1")
    stranger = Process("stranger", lambda: SLEEPER, tmp_path)
    assert stranger.pid is None
    stranger.kill()
    assert sleeper.pid is not None


def test_processes_that_have_just_ended_stop_no_kill(
    sleeper: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end between the look at their start time and the signal."""
    other = Process("other", lambda: SLEEPER, tmp_path)
    other.start()
    signal_it = os.kill

    def ended_meanwhile(pid: int, number: int) -> None:
        signal_it(pid, number)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", ended_meanwhile)
    sleeper.kill()
    kill_all(tmp_path)
    assert sleeper.pid is None and other.pid is None


def test_signal_to_a_stopped_process_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ComponentFailed, match="sleeper does not run"):
        Process("sleeper", lambda: SLEEPER, tmp_path).pause()


def test_an_early_end_is_reported_with_the_log(tmp_path: Path) -> None:
    broken = Process("broken", lambda: ["sh", "-c", "echo unknown flag: --nope; exit 3"], tmp_path)
    broken.start()
    with pytest.raises(
        ComponentFailed, match=r"(?s)broken ended while it was starting.*broken\.log.*unknown flag: --nope"
    ):
        broken.wait_until(lambda: False, timeout_seconds=10)


def test_process_that_is_never_ready_is_reported_with_its_log(sleeper: Process) -> None:
    sleeper.wait_until(lambda: "started" in sleeper.log_path.read_text(), timeout_seconds=10)
    with pytest.raises(ComponentFailed, match=r"(?s)sleeper was not ready after 0 s.*started"):
        sleeper.wait_until(lambda: False, timeout_seconds=0.05)


OWNER = """
import signal, sys
from pathlib import Path
from quire_cluster.processes import Guard, Process
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
state = Path(sys.argv[1])
guard = Guard(state)
process = Process("sleeper", lambda: sys.argv[2:], state)
process.start()
print(process.pid, guard.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_components_end_with_their_owner(tmp_path: Path, ending: signal.Signals) -> None:
    state = tmp_path / "state"
    state.mkdir()
    command = [sys.executable, "-c", OWNER, str(state), *SLEEPER]
    environment = os.environ | {"PYTHONPATH": TREE}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        process, guard = map(int, owner.stdout.readline().split())
        assert birth_of(process) is not None
        owner.send_signal(ending)
    assert process_ends(process, 10)
    assert process_ends(guard, 10)
    assert not state.exists()
