"""The choice of the CPU instructions that an engine uses, for all its processes.

``CpuFindings`` reads the findings of an earlier start, or runs the self-test in the background while the API process
loads. ``CpuChoice`` then gives the limits of each engine process, and goes one level lower after a process was killed
by SIGILL.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from quire_engine import kept
from quire_engine.config import GPU_DEVICES, DeviceOptions
from quire_engine.cpu.limits import LEVELS, ORDERS, CpuLevel, CpuLimits, Findings, limit_cpu
from quire_engine.errors import StartError
from quire_engine.kept import Machine, this_machine

_log = logging.getLogger(__name__)

KIND = "cpu"
FAILED = 3
"""The exit status of the self-test after a wrong result; its last line is the reason."""

RunSelfTest = Callable[[Mapping[str, str]], str | None]
"""A function that runs the self-test in an environment, and returns why it failed."""

_BY_INSTRUCTIONS = {-number for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)}


class CpuChoice:
    """The limits of the engine processes of one API process."""

    def __init__(
        self,
        flags: frozenset[str],
        findings: Findings,
        *,
        option: CpuLevel | Literal["auto"],
        environment: Mapping[str, str],
    ) -> None:
        self._flags = flags
        self._findings = findings
        self.asked = option
        """The value of ``--cpu-level``."""
        self._environment = environment
        self.limits = self._decide()

    def step_down(self) -> None:
        """Go one level lower, now and for later starts; there must be a lower level."""
        level = self.limits.level
        assert level is not None and self.limits.lower is not None
        reason = f"an engine process was killed by SIGILL at level {level}"
        self._findings = replace(self._findings, failed={**self._findings.failed, level: reason})
        kept.write(KIND, self._findings)
        self.limits = self._decide()

    def _decide(self) -> CpuLimits:
        return limit_cpu(self._flags, self._findings, option=self.asked, environment=self._environment)


def find_failures(machine: Machine, environment: Mapping[str, str], run: RunSelfTest) -> Findings:
    """Run the self-test at the level that the CPU claims, and one level lower each time it fails.

    At the claimed level it runs without limits first, then with limits for torch's libraries.
    """
    found = Findings(facts=facts_of(machine, environment))
    while LEVELS[0] not in found.failed:
        limits = limit_cpu(machine.flags, found, environment=environment)
        if limits.level is None or (why := run({**environment, **limits.environment})) is None:
            break
        if found.unlimited is None:
            found = replace(found, unlimited=why)
        else:
            found = replace(found, failed={**found.failed, limits.level: why})
    return found


def facts_of(machine: Machine, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return everything that determines the findings: the machine, and a user's own limits."""
    return (*machine.facts, *(f"{name}: {environment.get(name, '')}" for name in ORDERS))


def run_self_test(environment: Mapping[str, str]) -> str | None:
    """Run the self-test in a child program, and return the product that failed and how; None if all are right.

    Raise OSError if the end has another cause, so that nothing is known about the CPU: no memory (SIGKILL), no time
    (SIGALRM), or a program that cannot be started, whose reason the engine process will report itself.
    """
    command = (sys.executable, "-P", "-m", "quire_engine.cpu.self_test")
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=dict(environment), check=False
    )
    if ended.returncode == 0:
        return None
    last = ended.stdout.splitlines()[-1] if ended.stdout else "loading"
    if ended.returncode == FAILED:
        return last
    status = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"status {ended.returncode}"
    if ended.returncode not in _BY_INSTRUCTIONS:
        raise OSError(f"its program was ended by {status}: {ended.stderr.strip()[-500:]}")
    return f"{last}: killed by {status}"


class CpuFindings:
    """The findings of an earlier start, or a self-test that runs in a thread, which waits for child programs."""

    def __init__(
        self, options: DeviceOptions, *, machine: Machine | None = None, run: RunSelfTest = run_self_test
    ) -> None:
        """Read the findings, or start the self-test; ``run`` replaces its program."""
        machine = machine or this_machine()
        self._options = options
        self._flags = machine.flags
        self._findings: Findings | None = None
        self._thread: threading.Thread | None = None
        if options.device in GPU_DEVICES or not machine.is_x86_64:
            return
        environment = dict(os.environ)
        self._findings = kept.read(KIND, facts_of(machine, environment), Findings)
        if self._findings is None:
            arguments = (machine, environment, run)
            self._thread = threading.Thread(target=self._test, args=arguments, name="cpu self-test", daemon=True)
            self._thread.start()

    @property
    def is_known(self) -> bool:
        """True if ``choice`` returns at once."""
        return self._thread is None

    def choice(self) -> CpuChoice | None:
        """Wait for the self-test and return the limits; None if nothing is known about this machine.

        Raise StartError if every level failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self._findings is None:
            return None
        if LEVELS[0] in self._findings.failed:
            reasons = "; ".join(f"{level}: {reason}" for level, reason in self._findings.failed.items())
            raise StartError(f"the self-test of this CPU fails at every level ({reasons}): use another machine")
        return CpuChoice(self._flags, self._findings, option=self._options.cpu_level, environment=os.environ)

    def _test(self, machine: Machine, environment: Mapping[str, str], run: RunSelfTest) -> None:
        """Run the self-test, and keep its findings if a level works."""
        try:
            self._findings = find_failures(machine, environment, run)
        except OSError as error:
            _log.warning("the self-test of the CPU did not end: %s", error)
            return
        if LEVELS[0] not in self._findings.failed:
            kept.write(KIND, self._findings)


def report(choice: CpuChoice | None) -> dict[str, Any] | None:
    """Return the JSON of ``quire-engine --cpu-report``, for programs that plan for this machine."""
    if choice is None:
        return None
    return {
        **choice.limits.as_json(),
        "sentence": choice.limits.sentence,
        "multiplies_bfloat16": choice.limits.multiplies_bfloat16,
    }


def log_choice(choice: CpuChoice | None) -> None:
    """Log the level of the CPU, and why the findings cannot be stored."""
    if choice is None:
        return
    _log.info("CPU: %s", choice.limits.sentence)
    if choice.asked not in ("auto", choice.limits.level):
        _log.warning("--cpu-level %s: this CPU works up to %s", choice.asked, choice.limits.level or "below avx2")
    if (problem := kept.problem()) is not None:
        _log.warning("%s", problem)
