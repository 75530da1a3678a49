"""The folder of a run: one run at a time may use it, and its state tells whether it lives."""

from pathlib import Path

import pytest

from quire_cli.errors import AlreadyRunning, FileProblem
from quire_cli.local.state import RunFolder, RunState, read, run_folder, state_home

STATE = RunState(pid=7, started=1.0, time=2.0, file="demo.yaml", address="http://127.0.0.1:8000")


def test_run_lives_as_long_as_it_has_the_lock_of_its_folder(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path / "run", file=Path("demo.yaml"))
    first.write(STATE)
    run = read(tmp_path / "run")
    assert run is not None and run.is_live and run.state == STATE
    with pytest.raises(AlreadyRunning, match=r"demo.yaml is already running at http://127.0.0.1:8000 \(process 7\)"):
        RunFolder.claim(tmp_path / "run", file=Path("demo.yaml"))
    first.release()
    run = read(tmp_path / "run")
    assert run is not None and not run.is_live
    second = RunFolder.claim(tmp_path / "run", file=Path("demo.yaml"))
    assert read(tmp_path / "run") is None, "what the earlier run left is not the state of this one"
    second.release()


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


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}'])
def test_invalid_state_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert read(tmp_path) is None
