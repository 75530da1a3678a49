"""A whole start on a CPU that claims more than it supports: SIGILL kills the self-test, then the engine process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from quire_engine import kept

StartServer = Callable[..., AbstractContextManager[Any]]

pytestmark = [
    pytest.mark.timeout(900),  # the lower level may have to be compiled
    pytest.mark.skipif("avx512_vnni" not in kept.this_machine().flags, reason="this CPU has nothing to leave out"),
]


def test_engine_serves_on_a_cpu_that_rejects_instructions(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept.file_of("numba", "any").parent))  # compiled code is reused
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "shim"))
    refused = "quire_engine.cpu.self_test=ONEDNN_MAX_CPU_ISA quire_engine.ipc.loop=QUIRE_KERNELS_LEVEL"
    monkeypatch.setenv("SHIM_REFUSES", refused)
    with start_server() as server:
        cpu = server.http.get("/version").json()["cpu"]
        assert {"ONEDNN_MAX_CPU_ISA", "QUIRE_KERNELS_LEVEL"} <= cpu["environment"].keys()
        reasons = {each["feature"]: each["reason"] for each in cpu["left_out"]}
        assert reasons.pop("oneDNN without a limit") == "loading: killed by SIGILL"
        assert len(reasons) == 1 and "an engine process was killed by SIGILL" in next(iter(reasons.values()))
        answer = server.http.post("/v1/completions", json={"model": "demo", "prompt": "A list", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
