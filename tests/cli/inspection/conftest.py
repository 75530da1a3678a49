"""State files of ``quire up``, an API server with chosen answers, and the command itself."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from page_server import page_server
from run_quire import run_quire

from quire_cli.local.state import RunFolder, RunState, ServedState, run_folder, state_home


@dataclass
class Machine:
    """A machine of the test on which runs have left their state."""

    home: Path
    held: dict[Path, RunFolder] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.home)}

    def run(
        self, file: str, *, live: bool, time: float = 1000.0, ended: float | None = None, **served: ServedState
    ) -> Path:
        """Write the state of a run of this YAML file; this test holds the lock of a live one."""
        state = RunState(
            pid=os.getpid(),
            started=900.0,
            time=time,
            ended=ended,
            file=file,
            address="http://127.0.0.1:8000",
            deployments=served,
        )
        path = run_folder(state_home(self.environ), Path(file))
        if path in self.held:
            self.held.pop(path).release()
        folder = RunFolder.claim(path, file=Path(file))
        folder.write(state)
        if live:
            self.held[path] = folder
        else:
            folder.release()
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path / "state")
    yield machine
    for folder in machine.held.values():
        folder.release()


@dataclass
class FakeApiServer:
    """A server that answers GET with ``answers`` by path, else with 404 as an API server does."""

    kubeconfig: Path
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def __getitem__(self, path: str) -> tuple[int, Any]:
        missing = {"kind": "Status", "message": "the server could not find the requested resource"}
        return self.answers.get(path, (404, missing))


@pytest.fixture
def api_answers(tmp_path: Path) -> Iterator[FakeApiServer]:
    fake = FakeApiServer(tmp_path / "kubeconfig")

    def answer(path: str) -> tuple[int, str]:
        status, body = fake[path.partition("?")[0]]
        return status, body if isinstance(body, str) else json.dumps(body)

    with page_server(answer) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "gpu-cluster", "context": {"cluster": "c", "user": "u", "namespace": "prod"}}],
            "current-context": "gpu-cluster",
        }
        fake.kubeconfig.write_text(json.dumps(config))
        yield fake


Quire = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quire(machine: Machine, capfd: pytest.CaptureFixture[str]) -> Quire:
    """Return a function that runs the command on that machine and returns exit code, output and errors."""

    def run(*args: object) -> tuple[int, str, str]:
        code, out, err = run_quire(capfd, *args)
        return code, out, " ".join(err.split())

    return run
