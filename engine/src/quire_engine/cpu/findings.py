"""Trials of the instructions that the CPU reports, in child programs that may die; the findings are stored.

Instructions take a tenth of a second, torch's libraries as long as torch takes to load. If a child dies, another one
runs the remaining trials. If a trial of oneDNN fails, oneDNN is limited further and tried again.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from quire_engine.cpu.limits import ONEDNN_LADDER, ONEDNN_VARIABLE, CpuLevel, Findings, claimed_trials, least
from quire_engine.cpu.machine import Machine

KIND = "cpu"
ONEDNN_TRIALS = ("onednn-float32", "onednn-bfloat16", "onednn-float16", "onednn-int8")

_LOADING_SECONDS = 180.0
"""The time that a busy machine may need to load torch."""
_TRIAL_SECONDS = 30.0
_KILLED = "killed by SIGKILL"

RunTrials = Callable[[str, Sequence[str], Mapping[str, str]], dict[str, str]]
"""A function from a program's module, names of trials and an environment to the failed trials and their reasons."""

_REACHED_BY = {
    "AVX2": "avx512",
    "AVX512_CORE_VNNI": "avx512-bf16",
    "AVX512_CORE_BF16": "avx512-fp16",
    "AVX512_CORE_FP16": "amx-bf16",
}
"""The instructions that a CPU must report so that a limit of oneDNN excludes something."""


class TrialsInterrupted(OSError):
    """An error for trials that were stopped from outside, so that nothing is known about the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFindings:
    """A file in the cache folder."""

    facts: tuple[str, ...]
    findings: Findings
    died_at: tuple[CpuLevel, ...] = ()
    """The levels at which an engine process was killed by SIGILL although every trial was correct."""


def facts_of(machine: Machine, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return everything that determines the findings: the machine, and a user's own limit of oneDNN."""
    return (*machine.facts, f"{ONEDNN_VARIABLE}: {environment.get(ONEDNN_VARIABLE, '')}")


def try_out(machine: Machine, environment: Mapping[str, str], run: RunTrials | None = None) -> Findings:
    """Try everything that the machine's CPU reports, and return the findings."""
    run = run or run_trials
    claimed = claimed_trials(machine.flags)
    failed = run("quire_engine.cpu.instruction_trials", claimed, environment)
    found: dict[str, str] = {}
    onednn_failed: dict[str, str] = {}
    limit: str | None = None
    for limit in _ladder(claimed, failed):
        limited = dict(environment)
        if limit is not None:
            limited[ONEDNN_VARIABLE] = least(ONEDNN_VARIABLE, limit, environment.get(ONEDNN_VARIABLE))
        found = run("quire_engine.cpu.library_trials", ONEDNN_TRIALS, limited)
        if not found:
            break
        name, why = next(iter(found.items()))
        onednn_failed[limit or "none"] = f"{name.removeprefix('onednn-')}: {why}"
    # Trials that still fail at the lowest limit of oneDNN are avoided altogether.
    failed = failed | found
    return Findings(claimed=claimed, failed=failed, onednn_limit=limit, onednn_failed=onednn_failed)


def _ladder(claimed: Sequence[str], failed: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the limits of oneDNN to try: first no limit, then each limit that excludes more on this CPU.

    Instructions that failed directly are not tried through oneDNN.
    """
    trusted = [limit for limit in ONEDNN_LADDER if _REACHED_BY[limit] in claimed]
    broken = [place for place, limit in enumerate(trusted) if _REACHED_BY[limit] in failed]
    if not broken:
        yield None
    highest = min(broken, default=len(trusted) - 1)
    yield from reversed(trusted[: highest + 1])


def run_trials(module: str, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Run the trials in a child, and the remaining ones in another child if it dies; return failures and reasons.

    Raise TrialsInterrupted if a child is killed by SIGKILL. No instruction causes that, but the kernel sends it when
    memory is short, and would send it to every further child.
    """
    failed: dict[str, str] = {}
    left = list(names)
    while left:
        tried, why = _run_child(module, left, environment)
        failed.update({name: outcome for name, outcome in tried.items() if outcome != "ok"})
        left = left[len(tried) :]
        if why is None:
            break
        if not left:
            break
        if why == _KILLED:
            raise TrialsInterrupted("a child program was killed by SIGKILL, as Linux does where memory is short")
        if not tried and why.startswith("ended"):
            break  # The child cannot even be started; the engine process will report the reason itself.
        failed[left.pop(0)] = why
    return failed


def _run_child(module: str, names: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the outcome of each finished trial, and how the child ended, or None if it ended normally."""
    command = (sys.executable, "-P", "-m", module, *names)
    tried: dict[str, str] = {}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environment)
    ) as child:
        assert child.stdout is not None
        try:
            for line in _lines(child.stdout, first=_LOADING_SECONDS, then=_TRIAL_SECONDS):
                word, _, rest = line.partition(" ")
                if word == "end":
                    name, _, outcome = rest.partition(" ")
                    tried[name] = outcome
            status = child.wait(_TRIAL_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            return tried, "no answer"
        finally:
            child.kill()
    return tried, None if len(tried) == len(names) else _ending(status)


def _lines(stream: IO[bytes], *, first: float, then: float) -> Iterator[str]:
    """Yield whole lines until the end. Raise TimeoutError if a line does not arrive in time."""
    descriptor, buffer, seconds = stream.fileno(), b"", first
    deadline = time.monotonic() + seconds
    while True:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        data = os.read(descriptor, 4096)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if lines:
            deadline = time.monotonic() + then


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
