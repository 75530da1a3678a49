"""The folder of a run: one run at a time may use it, and only processes that an earlier run left are ended."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_local.harness import is_alive, until_dead

from quire_cli.errors import AlreadyRunning, FileProblem
from quire_cli.local.process import ProcessIdentity, identify
from quire_cli.local.state import RunFolder, end_leftovers, read_state, run_folder, state_home

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()",
    *SLEEP,
]


@pytest.fixture
def stranger() -> Iterator[ProcessIdentity]:
    """Yield a process that no run has started."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    identity = identify(process.pid)
    assert identity is not None
    yield identity
    process.kill()
    process.wait()


def state(*processes: ProcessIdentity) -> dict[str, object]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    records = [{"name": f"p{i}", "pid": p.pid, "started": p.started} for i, p in enumerate(processes)]
    return {"boot": boot, "processes": records}


def test_state_folder_is_locked_by_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path / "run", file=Path("demo.yaml"))
    first.write({"pid": 7, "address": "http://127.0.0.1:8000"})
    with pytest.raises(AlreadyRunning, match=r"demo.yaml is already running at http://127.0.0.1:8000 \(process 7\)"):
        RunFolder.claim(tmp_path / "run", file=Path("demo.yaml"))
    first.release()
    RunFolder.claim(tmp_path / "run", file=Path("demo.yaml")).release()


def test_unwritable_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """On a full disk, empty files can still be created."""
    in_the_way = tmp_path / "run" / ".endpoints.json.new"
    in_the_way.mkdir(parents=True)
    with pytest.raises(FileProblem, match=r"run, for logs and state, cannot be written: Is a directory"):
        RunFolder.claim(tmp_path / "run", file=Path("f.yaml"))
    in_the_way.rmdir()
    RunFolder.claim(tmp_path / "run", file=Path("f.yaml")).release()


def test_same_file_name_in_two_folders_gives_two_states(tmp_path: Path) -> None:
    assert run_folder(tmp_path, Path("/a/demo.yaml")) != run_folder(tmp_path, Path("/b/demo.yaml"))
    assert run_folder(tmp_path, Path("/a/demo.yaml")).name.startswith("demo-")
    assert state_home({"XDG_STATE_HOME": "/s"}) == Path("/s/quire")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_new_run_ends_processes_of_a_killed_one(tmp_path: Path) -> None:
    """Processes that the left one started are ended too, even if the recorded one has exited in the meantime."""
    for leader_lives in (True, False):
        parent = subprocess.Popen(PARENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert parent.stdout is not None and parent.stdin is not None
        child = int(parent.stdout.readline())
        identity = identify(parent.pid)
        assert identity is not None
        folder = tmp_path / "run"
        RunFolder.claim(folder, file=Path("f")).release()
        (folder / "state.json").write_text(json.dumps(state(identity)))
        if not leader_lives:
            parent.stdin.close()
            parent.wait()
        RunFolder.claim(folder, file=Path("f")).release()
        await until_dead([child])
        parent.wait()
        parent.stdout.close()
        parent.stdin.close()


def test_process_with_a_reused_pid_is_not_killed(stranger: ProcessIdentity) -> None:
    earlier = ProcessIdentity(pid=stranger.pid, started=str(int(stranger.started) - 1))
    assert end_leftovers(state(earlier)) == []
    assert end_leftovers({**state(stranger), "boot": "another"}) == []
    assert is_alive(stranger.pid)
    assert end_leftovers(state(stranger)) == ["p0"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"processes": 3}', '{"processes": [{"pid": "x"}, 3]}'])
def test_invalid_state_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert end_leftovers({**read_state(tmp_path), "boot": state()["boot"]}) == []
