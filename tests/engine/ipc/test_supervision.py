"""The conditions under which an engine counts as hung, and the number of restarts."""

import signal

import pytest

from quire_engine.cpu.limits import CpuLevel, CpuLimits
from quire_engine.ipc.process import Ended, compute_environment
from quire_engine.ipc.supervision import EngineLoss, RestartBudget, SilenceWatch, level_after


@pytest.mark.parametrize(
    ("times", "delays"),
    [
        pytest.param([0, 1, 2, 3], [0.0, 1.0, 5.0, None], id="later each time, then no more"),
        pytest.param([0, 100, 200, 300], [0.0, 0.0, 0.0, 0.0], id="far apart they do not add up"),
        pytest.param([0, 1, 2, 101, 101, 101], [0.0, 1.0, 5.0, 1.0, 5.0, None], id="the window slides"),
    ],
)
def test_restart_budget(times: list[float], delays: list[float | None]) -> None:
    budget = RestartBudget((0.0, 1.0, 5.0), 99.5)
    assert [budget.next_delay(now) for now in times] == delays


@pytest.mark.parametrize(
    ("checks", "expected_seconds", "hung"),
    [
        pytest.param("." * 9, 0.0, False, id="not silent for long enough"),
        pytest.param("." * 10, 0.0, True, id="silent"),
        pytest.param("." * 9 + "h" + "." * 9, 0.0, False, id="one message restarts the time"),
        pytest.param("." * 10, 6.0, True, id="a step within the timeout"),
        pytest.param("." * 19, 12.0, False, id="a step that is expected to take long"),
        pytest.param("." * 20, 12.0, True, id="ten times as long as expected"),
    ],
)
def test_silence(checks: str, expected_seconds: float, hung: bool) -> None:
    watch = SilenceWatch(60.0)
    assert [watch.check(heard=check == "h", expected_seconds=expected_seconds) for check in checks][-1] == hung


@pytest.mark.parametrize(
    ("status", "level", "expected"),
    [
        (-signal.SIGILL, "amx", "avx512-bf16"),
        (-signal.SIGILL, "avx512-bf16", "avx512"),
        (-signal.SIGILL, "avx512", "avx2"),
        pytest.param(-signal.SIGILL, "avx2", None, id="no level is lower"),
        pytest.param(-signal.SIGILL, None, None, id="a CPU below every level"),
        pytest.param(-signal.SIGSEGV, "amx", None, id="another signal"),
        pytest.param(1, "amx", None, id="an exit status"),
        pytest.param(None, "amx", None, id="it hangs"),
    ],
)
def test_level_after_a_loss(status: int | None, level: CpuLevel | None, expected: CpuLevel | None) -> None:
    loss = EngineLoss(reason="", ended=None if status is None else Ended(status))
    limits = CpuLimits(level=level, kernels=None, environment={})
    assert level_after(loss, limits) == expected
    assert level_after(loss, None) is None


def test_limits_of_the_cpu_reach_the_engine_process() -> None:
    limits = CpuLimits(level="avx2", kernels="x86-64-v3", environment={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    users = {"ONEDNN_MAX_CPU_ISA": "ALL"}
    assert compute_environment(1, users, limits)["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert compute_environment(1, users)["ONEDNN_MAX_CPU_ISA"] == "ALL"


def test_engine_uses_given_threads_which_sleep_when_idle() -> None:
    """The threads first spin for a moment, which the engine can stop only with the passive policy."""
    environment = compute_environment(3, {"PATH": "/bin", "OMP_NUM_THREADS": "64", "OMP_WAIT_POLICY": "ACTIVE"})
    assert environment["PATH"] == "/bin"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(environment["GOMP_SPINCOUNT"]) < 100_000
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    assert {environment[pool] for pool in pools} == {"3"}


def test_compiled_kernels_stay_within_their_recorded_bounds() -> None:
    bounds = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    assert {compute_environment(1, {})[bound] for bound in bounds} == {"320"}
    assert {compute_environment(1, dict.fromkeys(bounds, "1024"))[bound] for bound in bounds} == {"1024"}
