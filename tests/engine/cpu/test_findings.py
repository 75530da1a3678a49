"""Trials in child processes that die, and the stored findings."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from quire_engine import kept
from quire_engine.config import DeviceOptions
from quire_engine.cpu import findings
from quire_engine.cpu.choice import CpuChoice, find_out, log_choice
from quire_engine.cpu.findings import (
    KeptFindings,
    TrialsInterrupted,
    facts_of,
    run_trials,
    try_out,
)
from quire_engine.cpu.instruction_trials import TRIALS
from quire_engine.cpu.limits import CLAIMS, ONEDNN_VARIABLE, Findings, limit_cpu
from quire_engine.cpu.machine import Machine, this_machine

FACTS = ("model name: Some CPU", "kernel: 6.1")
ZEN4 = CLAIMS["avx2"] | CLAIMS["avx512"] | CLAIMS["avx512-vnni"] | CLAIMS["avx512-bf16"]
EVERYTHING = frozenset().union(*CLAIMS.values())
INSTRUCTIONS, LIBRARIES = "quire_engine.cpu.instruction_trials", "quire_engine.cpu.library_trials"


def machine(flags: frozenset[str] = ZEN4) -> Machine:
    return Machine(flags=flags, facts=FACTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"


# --- children ---


@pytest.mark.parametrize(
    ("endings", "failed"),
    [
        ("", {}),
        ("b=SIGILL", {"b": "killed by SIGILL"}),
        ("a=SIGILL c=SIGSEGV", {"a": "killed by SIGILL", "c": "killed by SIGSEGV"}),
        ("b=wrong", {"b": "wrong results"}),
        ("b=exit", {"b": "ended with status 3"}),
        ("b=hang", {"b": "no answer"}),
    ],
)
def test_crashed_child_fails_only_the_trial_it_ran(
    endings: str, failed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "_TRIAL_SECONDS", 5.0)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SHIM_ENDINGS": endings}
    assert run_trials("dying_trials", ["a", "b", "c"], environment) == failed


def test_a_child_killed_for_lack_of_memory_ends_all_trials() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SHIM_ENDINGS": "a=SIGKILL"}
    with pytest.raises(TrialsInterrupted):
        run_trials("dying_trials", ["a", "b"], environment)


@pytest.mark.skipif(not this_machine().is_x86_64, reason="levels are of x86-64 Linux")
def test_interrupted_trials_set_no_limit_and_store_nothing(cache: Path) -> None:
    def run(module: str, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        raise TrialsInterrupted

    assert find_out(DeviceOptions(), machine=machine(), run=run).choice() is None
    assert not list(cache.rglob("*.json"))


def test_a_program_that_cannot_be_started_fails_no_trial() -> None:
    assert run_trials("no_such_program", ["a", "b"], os.environ) == {}


def test_every_instruction_that_may_be_claimed_has_a_trial() -> None:
    assert TRIALS.keys() == CLAIMS.keys()
    for make in TRIALS.values():
        wanted = make()
        assert len(wanted.sums) == len(wanted.expected) and wanted.sums != wanted.expected


@pytest.mark.skipif(not this_machine().is_x86_64, reason="levels are of x86-64 Linux")
def test_instructions_that_this_cpu_claims_work() -> None:
    claimed = [trial for trial, flags in CLAIMS.items() if flags <= this_machine().flags]
    failed = run_trials(INSTRUCTIONS, claimed, os.environ)
    assert failed.keys() <= {"amx-bf16", "amx-int8"}  # virtual machines may claim these without support


# --- conclusions ---

Fails = Callable[[str, str | None], dict[str, str]]


def trying(fails: Fails) -> tuple[list[str | None], findings.RunTrials]:
    """Return the list of tried oneDNN limits, and a program that fails by them."""
    tried: list[str | None] = []

    def run(module: str, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        limit = environment.get(ONEDNN_VARIABLE)
        if module == LIBRARIES:
            tried.append(limit)
        return {name: why for name, why in fails(module, limit).items() if name in names}

    return tried, run


@pytest.mark.parametrize(
    ("flags", "fails", "limits", "onednn_limit", "failed"),
    [
        pytest.param(ZEN4, lambda module, limit: {}, [None], None, {}, id="everything works"),
        pytest.param(
            EVERYTHING,
            lambda module, limit: {"onednn-bfloat16": "killed by SIGILL"} if limit is None else {},
            [None, "AVX512_CORE_FP16"],
            "AVX512_CORE_FP16",
            {},
            id="oneDNN traps where AMX is claimed",
        ),
        pytest.param(
            EVERYTHING,
            lambda module, limit: {"amx-bf16": "killed by SIGILL", "amx-int8": "killed by SIGILL"},
            ["AVX512_CORE_FP16"],
            "AVX512_CORE_FP16",
            {"amx-bf16": "killed by SIGILL", "amx-int8": "killed by SIGILL"},
            id="what fails by itself is not tried through oneDNN",
        ),
        pytest.param(
            ZEN4,
            lambda module, limit: {} if limit == "AVX2" else {"onednn-float32": "killed by SIGILL"},
            [None, "AVX512_CORE_VNNI", "AVX2"],
            "AVX2",
            {},
            id="only AVX2 works in oneDNN",
        ),
    ],
)
def test_onednn_is_limited_until_it_works(
    flags: frozenset[str],
    fails: Fails,
    limits: list[str | None],
    onednn_limit: str | None,
    failed: dict[str, str],
) -> None:
    tried, run = trying(fails)
    found = try_out(machine(flags), {}, run)
    assert tried == limits
    assert (found.onednn_limit, found.failed) == (onednn_limit, failed)
    assert len(found.onednn_failed) == len(tried) - 1


def test_kernel_failing_at_every_onednn_limit_is_avoided() -> None:
    tried, run = trying(lambda module, limit: {"onednn-bfloat16": "wrong results"})
    found = try_out(machine(ZEN4), {}, run)
    assert len(found.onednn_failed) == len(tried) and found.onednn_limit == tried[-1]
    assert limit_cpu(found, environment={}).avoid == ("onednn-bfloat16",)


def test_a_users_limit_of_onednn_is_not_raised_by_a_trial() -> None:
    tried, run = trying(lambda module, limit: {"onednn-int8": "killed by SIGILL"})
    try_out(machine(EVERYTHING), {ONEDNN_VARIABLE: "AVX512_CORE"}, run)
    assert set(tried) == {"AVX512_CORE", "AVX2"}


# --- stored findings ---


def test_findings_are_reused_on_the_same_machine_only() -> None:
    found = KeptFindings(facts=FACTS, findings=Findings(claimed=("avx2",), failed={"avx2": "x"}), died_at=("amx",))
    kept.write(findings.KIND, found)
    assert kept.read(findings.KIND, FACTS, KeptFindings) == found
    assert kept.read(findings.KIND, ("model name: Another CPU",), KeptFindings) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'{"facts": [], "findings": {}}', b'{"facts": 3}', b'{"facts": ["\xff"]}']
)
def test_damaged_findings_file_is_ignored(content: bytes) -> None:
    kept.write(findings.KIND, KeptFindings(facts=FACTS, findings=Findings(claimed=())))
    kept.file_of(findings.KIND, kept.key_of(FACTS)).write_bytes(content)
    assert kept.read(findings.KIND, FACTS, KeptFindings) is None


def test_findings_that_cannot_replace_a_file_leave_nothing_behind() -> None:
    file = kept.file_of(findings.KIND, kept.key_of(FACTS))
    file.mkdir(parents=True)
    kept.write(findings.KIND, KeptFindings(facts=FACTS, findings=Findings(claimed=())))
    assert list(file.parent.iterdir()) == [file]


def test_findings_file_of_another_machine_is_ignored() -> None:
    kept.write(findings.KIND, KeptFindings(facts=FACTS, findings=Findings(claimed=())))
    other = ("model name: Another CPU",)
    kept.file_of(findings.KIND, kept.key_of(FACTS)).rename(kept.file_of(findings.KIND, kept.key_of(other)))
    assert kept.read(findings.KIND, other, KeptFindings) is None


def test_findings_key_distinguishes_cpus_and_microcode(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    keys = set()
    for text in ("model name : A\nmicrocode : 1\nflags : avx2\n", "model name : A\nmicrocode : 2\nflags : avx2\n",
                 "model name : A\nmicrocode : 2\nflags : avx2 avx512f\n"):  # fmt: skip
        cpuinfo.write_text(text + "cpu MHz : 2600.1\n\nprocessor : 1\n")
        keys |= {kept.key_of(facts_of(this_machine(cpuinfo), {}))}
        cpuinfo.write_text(text + "cpu MHz : 3100.7\n\nprocessor : 1\n")
        keys |= {kept.key_of(facts_of(this_machine(cpuinfo), {}))}
    assert len(keys) == 3
    assert this_machine(tmp_path / "absent").flags == frozenset()


# --- a choice ---


@pytest.mark.skipif(not this_machine().is_x86_64, reason="levels are of x86-64 Linux")
def test_machine_is_tested_once_and_failed_levels_are_stored() -> None:
    tried, run = trying(lambda module, limit: {})
    first = find_out(DeviceOptions(), machine=machine(), run=run)
    assert not first.is_known
    choice = first.choice()
    assert choice is not None and choice.limits.level == "avx512-bf16"
    choice.step_down()
    assert choice.limits.level == "avx512"
    later = find_out(DeviceOptions(), machine=machine(), run=run)
    assert later.is_known and tried == [None]
    again = later.choice()
    assert again is not None and again.limits == choice.limits


@pytest.mark.skipif(not this_machine().is_x86_64, reason="levels are of x86-64 Linux")
def test_unwritable_folder_repeats_the_trials_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        _, run = trying(lambda module, limit: {})
        finding = find_out(DeviceOptions(), machine=machine(), run=run)
        assert not finding.is_known
        choice = finding.choice()
        assert choice is not None
        choice.step_down()
        assert choice.limits.level == "avx512"
    log_choice(choice)
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


def test_a_gpu_or_another_kind_of_machine_is_not_tried() -> None:
    assert find_out(DeviceOptions(device="cuda"), machine=machine()).choice() is None


@pytest.mark.parametrize(("option", "warned"), [("auto", False), ("avx512", False), ("amx", True)])
def test_a_level_that_the_cpu_lacks_is_warned_of(option: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    found = KeptFindings(facts=FACTS, findings=Findings(claimed=("avx2", "avx512")))
    log_choice(CpuChoice(found, option=option, environment={}))  # type: ignore[arg-type]
    assert ("--cpu-level amx" in caplog.text) == warned
