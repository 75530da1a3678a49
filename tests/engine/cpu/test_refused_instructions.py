"""A whole start on a CPU that claims more than it supports: SIGILL kills a trial or the engine process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from quire_engine import kept
from quire_engine.cpu.machine import this_machine

StartServer = Callable[..., AbstractContextManager[Any]]

pytestmark = [
    pytest.mark.timeout(900),  # the lower level may have to be compiled
    pytest.mark.skipif("avx512_vnni" not in this_machine().flags, reason="this CPU has no instructions to leave out"),
]


@pytest.mark.parametrize(
    ("program", "variable", "feature"),
    [
        pytest.param(
            "quire_engine.cpu.library_trials", "ONEDNN_MAX_CPU_ISA", "oneDNN without a limit", id="oneDNN traps"
        ),
        pytest.param("quire_engine.ipc.loop", "QUIRE_KERNELS_LEVEL", None, id="the engine process dies"),
    ],
)
def test_engine_serves_on_a_cpu_that_rejects_instructions(
    program: str,
    variable: str,
    feature: str | None,
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept.file_of("numba", "any").parent))  # compiled code is reused
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "shim"))
    monkeypatch.setenv("SHIM_REFUSES", f"{program} {variable}")
    with start_server() as server:
        cpu = server.http.get("/version").json()["cpu"]
        assert variable in cpu["environment"]
        reasons = [each["reason"] for each in cpu["left_out"] if feature in (None, each["feature"])]
        assert reasons and all("killed by SIGILL" in reason for reason in reasons)
        answer = server.http.post("/v1/completions", json={"model": "demo", "prompt": "A list", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
