"""The self-test of the CPU in a child process that may die, and the stored findings."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from quire_engine import kept
from quire_engine.config import DeviceOptions
from quire_engine.cpu.choice import (
    KIND,
    CpuChoice,
    CpuFindings,
    RunSelfTest,
    facts_of,
    find_failures,
    log_choice,
    run_self_test,
)
from quire_engine.cpu.limits import KERNELS, KERNELS_VARIABLE, ONEDNN_VARIABLE, CpuLevel, Findings
from quire_engine.cpu.self_test import is_right
from quire_engine.errors import StartError
from quire_engine.kept import Machine, this_machine

FACTS = ("model name: Some CPU", "kernel: 6.1")
AVX2, _, AVX512, _, ZEN4, SAPPHIRE_RAPIDS = (flags for _, _, flags in KERNELS)
SHIM = str(Path(__file__).parent / "shim")

only_x86_64 = pytest.mark.skipif(not this_machine().is_x86_64, reason="levels are of x86-64 Linux")


def machine(flags: frozenset[str] = ZEN4) -> Machine:
    return Machine(flags=flags, facts=FACTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Compiled code is reused.
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR", str(kept.file_of("numba", "any").parent)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"


# --- the child process ---


@only_x86_64
@pytest.mark.timeout(300)
def test_self_test_of_this_cpu_finds_a_level_that_works() -> None:
    found = CpuFindings(DeviceOptions()).choice()
    assert found is not None
    tiles = {"amx", "oneDNN without a limit"}  # virtual machines may claim these without support
    assert not this_machine().flags & ZEN4 >= ZEN4 or found.limits.left_out.keys() <= tiles


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("os._exit(0)", None),
        ("import signal; os.kill(os.getpid(), signal.SIGILL)", "loading: killed by SIGILL"),
        ("print('onednn bf16', flush=True); os.abort()", "onednn bf16: killed by SIGABRT"),
        ("print('a\\na: wrong results', flush=True); os._exit(3)", "a: wrong results"),
    ],
)
def test_ending_of_the_child_is_the_reason(ends: str, why: str | None) -> None:
    assert run_self_test(shimmed(ends)) == why


@pytest.mark.parametrize(
    "ends",
    [
        "import signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import signal; signal.alarm(1); signal.pause()",
        "os._exit(1)",
    ],
)
def test_child_that_ends_for_another_reason_says_nothing(ends: str) -> None:
    with pytest.raises(OSError, match="was ended by"):
        run_self_test(shimmed(ends))


def shimmed(ends: str) -> dict[str, str]:
    refuses = "quire_engine.cpu.self_test=NO_SUCH_VARIABLE"
    return {**os.environ, "PYTHONPATH": SHIM, "SHIM_REFUSES": refuses, "SHIM_ENDS": ends}


@pytest.mark.parametrize(
    ("error", "right"), [(0.0, True), (0.05, True), (10.0, False), (float("nan"), False), (float("inf"), False)]
)
def test_products_are_compared_with_exact_results(error: float, right: bool) -> None:
    assert is_right(lambda x, weight: x @ weight.t() + error * torch.eye(len(x), len(weight))) == right


# --- conclusions ---

Limits = tuple[str | None, str | None]
"""The limits of oneDNN and of our kernels."""


def trying(works: Callable[[str | None, str | None], bool]) -> tuple[list[Limits], RunSelfTest]:
    """Return the list of limits that were tried, and a self-test that fails by them."""
    tried: list[Limits] = []

    def run(environment: Mapping[str, str]) -> str | None:
        tried.append((environment.get(ONEDNN_VARIABLE), environment.get(KERNELS_VARIABLE)))
        return None if works(*tried[-1]) else f"failure {len(tried)}"

    return tried, run


@pytest.mark.parametrize(
    ("flags", "works", "tried", "failed"),
    [
        pytest.param(ZEN4, lambda onednn, kernels: True, [(None, None)], [], id="everything works"),
        pytest.param(
            SAPPHIRE_RAPIDS, lambda onednn, kernels: onednn is not None,
            [(None, None), ("AVX512_CORE_FP16", None)], [], id="oneDNN traps where AMX is claimed",
        ),
        pytest.param(
            SAPPHIRE_RAPIDS, lambda onednn, kernels: kernels is not None,
            [(None, None), ("AVX512_CORE_FP16", None), ("AVX512_CORE_FP16", "x86-64-v4-bf16")], ["amx"],
            id="AMX works nowhere",
        ),
        pytest.param(
            ZEN4, lambda onednn, kernels: onednn == "AVX2",
            [
                (None, None), ("AVX512_CORE_FP16", None), ("AVX512_CORE_VNNI", "x86-64-v4-vnni"),
                ("AVX2", "x86-64-v3"),
            ],
            ["avx512-bf16", "avx512"], id="only AVX2 works",
        ),
        pytest.param(
            AVX2, lambda onednn, kernels: False, [(None, None), ("AVX2", None)], ["avx2"], id="nothing works"
        ),
        pytest.param(frozenset(), lambda onednn, kernels: False, [], [], id="no levels"),
    ],
)  # fmt: skip
def test_next_lower_level_is_tried_after_a_failure(
    flags: frozenset[str], works: Callable[..., bool], tried: list[Limits], failed: list[str]
) -> None:
    seen, run = trying(works)
    found = find_failures(machine(flags), {}, run)
    assert seen == tried and list(found.failed) == failed
    assert (found.unlimited is None) == (len(tried) < 2)
    numbers = [found.unlimited, *found.failed.values()] if found.unlimited else []
    assert numbers == [f"failure {number + 1}" for number in range(len(numbers))]


def test_users_limit_is_not_raised_by_the_self_test() -> None:
    tried, run = trying(lambda onednn, kernels: kernels is not None)
    find_failures(machine(SAPPHIRE_RAPIDS), {ONEDNN_VARIABLE: "AVX512_CORE"}, run)
    assert {onednn for onednn, _ in tried} == {"AVX512_CORE"}


@only_x86_64
def test_interrupted_self_test_sets_no_limit_and_stores_nothing(cache: Path) -> None:
    def run(environment: Mapping[str, str]) -> str | None:
        raise OSError("no memory")

    assert CpuFindings(DeviceOptions(), machine=machine(), run=run).choice() is None
    assert not list(cache.rglob("*.json"))


@only_x86_64
def test_cpu_that_fails_at_every_level_is_refused_and_not_stored(cache: Path) -> None:
    _, run = trying(lambda onednn, kernels: False)
    with pytest.raises(StartError, match="avx512: failure 3; avx2: failure 4"):
        CpuFindings(DeviceOptions(), machine=machine(AVX512 | {"avx512_vnni", "avx512_bf16"}), run=run).choice()
    assert not list(cache.rglob("*.json"))


# --- stored findings ---


def test_findings_are_reused_on_the_same_machine_only() -> None:
    found = Findings(facts=FACTS, unlimited="x", failed={"amx": "y"})
    kept.write(KIND, found)
    assert kept.read(KIND, FACTS, Findings) == found
    assert kept.read(KIND, ("model name: Another CPU",), Findings) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'{"facts": [], "failed": {}}', b'{"facts": 3}', b'{"facts": ["\xff"]}']
)
def test_damaged_findings_file_is_ignored(content: bytes) -> None:
    kept.write(KIND, Findings(facts=FACTS))
    kept.file_of(KIND, kept.key_of(FACTS)).write_bytes(content)
    assert kept.read(KIND, FACTS, Findings) is None


def test_findings_that_cannot_replace_a_file_leave_nothing_behind() -> None:
    file = kept.file_of(KIND, kept.key_of(FACTS))
    file.mkdir(parents=True)
    kept.write(KIND, Findings(facts=FACTS))
    assert list(file.parent.iterdir()) == [file]


def test_findings_file_of_another_machine_is_ignored() -> None:
    kept.write(KIND, Findings(facts=FACTS))
    other = ("model name: Another CPU",)
    kept.file_of(KIND, kept.key_of(FACTS)).rename(kept.file_of(KIND, kept.key_of(other)))
    assert kept.read(KIND, other, Findings) is None


def test_findings_key_distinguishes_cpus_microcode_and_limits(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    keys = set()
    for text in ("model name : A\nmicrocode : 1\nflags : avx2\n", "model name : A\nmicrocode : 2\nflags : avx2\n",
                 "model name : A\nmicrocode : 2\nflags : avx2 avx512f\n"):  # fmt: skip
        for speed in ("2600.1", "3100.7"):
            cpuinfo.write_text(f"{text}cpu MHz : {speed}\n\nprocessor : 1\n")
            keys |= {kept.key_of(facts_of(this_machine(cpuinfo), {}))}
    keys |= {kept.key_of(facts_of(this_machine(cpuinfo), {ONEDNN_VARIABLE: "AVX2"}))}
    assert len(keys) == 4
    assert this_machine(tmp_path / "absent").flags == frozenset()


# --- a choice ---


@only_x86_64
def test_machine_is_tested_once_and_failed_levels_are_stored() -> None:
    tried, run = trying(lambda onednn, kernels: True)
    first = CpuFindings(DeviceOptions(), machine=machine(), run=run)
    assert not first.is_known
    choice = first.choice()
    assert choice is not None and choice.limits.level == "avx512-bf16"
    choice.step_down()
    assert choice.limits.level == "avx512"
    later = CpuFindings(DeviceOptions(), machine=machine(), run=run)
    assert later.is_known and tried == [(None, None)]
    again = later.choice()
    assert again is not None and again.limits == choice.limits
    assert "killed by SIGILL at level avx512-bf16" in again.limits.left_out["avx512-bf16"]


def test_engine_that_dies_below_a_level_set_by_hand_stays_below_it() -> None:
    choice = CpuChoice(SAPPHIRE_RAPIDS, Findings(facts=FACTS), option="avx512", environment={})
    choice.step_down()
    stored = kept.read(KIND, FACTS, Findings)
    assert stored is not None
    assert CpuChoice(SAPPHIRE_RAPIDS, stored, option="auto", environment={}).limits.level == "avx2"


@only_x86_64
def test_unwritable_folder_repeats_the_self_test_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        _, run = trying(lambda onednn, kernels: True)
        findings = CpuFindings(DeviceOptions(), machine=machine(), run=run)
        assert not findings.is_known
        choice = findings.choice()
        assert choice is not None
        choice.step_down()
        assert choice.limits.level == "avx512"
    log_choice(choice)
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


def test_gpu_is_not_tested() -> None:
    assert CpuFindings(DeviceOptions(device="cuda"), machine=machine()).choice() is None


@pytest.mark.parametrize(("option", "warned"), [("auto", False), ("avx512", False), ("amx", True)])
def test_level_that_the_cpu_lacks_is_warned_of(
    option: CpuLevel, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log_choice(CpuChoice(AVX512, Findings(facts=FACTS), option=option, environment={}))
    assert ("--cpu-level amx" in caplog.text) == warned
