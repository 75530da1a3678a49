"""The choice of the CPU instructions that an engine uses, for all its processes.

``find_out`` reads the findings of an earlier start, or tries everything in the background while the API process loads.
``CpuChoice`` then gives the limits of each engine process, and goes one level lower after a process was killed by
SIGILL.
"""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from quire_engine import kept
from quire_engine.config import GPU_DEVICES, DeviceOptions
from quire_engine.cpu.findings import KIND, KeptFindings, RunTrials, facts_of, try_out
from quire_engine.cpu.limits import CpuLevel, CpuLimits, Findings, limit_cpu
from quire_engine.cpu.machine import Machine, this_machine

_log = logging.getLogger(__name__)


class CpuChoice:
    """The limits of the engine processes of one API process."""

    def __init__(
        self, found: KeptFindings, *, option: CpuLevel | Literal["auto"], environment: Mapping[str, str]
    ) -> None:
        self._found = found
        self._option = option
        self._environment = environment
        self.limits = self._decide()

    @property
    def asked(self) -> CpuLevel | Literal["auto"]:
        """The value of ``--cpu-level``."""
        return self._option

    def step_down(self) -> None:
        """Go one level lower, now and for later starts; there must be a lower level."""
        assert self.limits.level is not None and self.limits.lower is not None
        self._found = replace(self._found, died_at=(*self._found.died_at, self.limits.level))
        kept.write(KIND, self._found)
        self.limits = self._decide()

    def _decide(self) -> CpuLimits:
        return limit_cpu(
            self._found.findings,
            option=self._option,
            died_at=self._found.died_at,
            environment=self._environment,
        )


class FindingOut:
    """The findings of an earlier start, or running trials."""

    def __init__(self, kept_findings: KeptFindings | None, trials: "_Trials | None", options: DeviceOptions) -> None:
        self._kept = kept_findings
        self._trials = trials
        self._options = options

    @property
    def is_known(self) -> bool:
        """True if ``choice`` returns at once."""
        return self._trials is None

    def choice(self) -> CpuChoice | None:
        """Wait for the trials and return the limits; None if this kind of machine has no levels."""
        found = self._kept if self._trials is None else self._trials.result()
        if found is None:
            return None
        return CpuChoice(found, option=self._options.cpu_level, environment=os.environ)


class _Trials:
    """The trials, run in a thread that waits for child programs."""

    def __init__(self, machine: Machine, environment: Mapping[str, str], run: RunTrials | None) -> None:
        self._machine = machine
        self._environment = environment
        self._run = run
        self._found: Findings | None = None
        self._thread = threading.Thread(target=self._try_out, name="cpu trials", daemon=True)
        self._thread.start()

    def result(self) -> KeptFindings | None:
        """Wait for the trials, and store their findings."""
        self._thread.join()
        if self._found is None:
            return None
        found = KeptFindings(facts=facts_of(self._machine, self._environment), findings=self._found)
        kept.write(KIND, found)
        return found

    def _try_out(self) -> None:
        try:
            self._found = try_out(self._machine, self._environment, self._run)
        except OSError as error:
            _log.warning("trials of the CPU's instructions did not end: %s", error)


def find_out(options: DeviceOptions, *, machine: Machine | None = None, run: RunTrials | None = None) -> FindingOut:
    """Return the stored findings of this machine, or start the trials. ``run`` replaces the function that runs them."""
    machine = machine or this_machine()
    if options.device in GPU_DEVICES or not machine.is_x86_64:
        return FindingOut(None, None, options)
    environment = dict(os.environ)
    found = kept.read(KIND, facts_of(machine, environment), KeptFindings)
    return FindingOut(found, None if found is not None else _Trials(machine, environment, run), options)


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
