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
from quire_engine.cpu.limits import CpuLevel, CpuLimits, limit_cpu
from quire_engine.cpu.machine import Machine, this_machine

_log = logging.getLogger(__name__)


class CpuChoice:
    """The limits of the engine processes of one API process."""

    def __init__(
        self, found: KeptFindings, *, option: CpuLevel | Literal["auto"], environment: Mapping[str, str]
    ) -> None:
        self._found = found
        self.asked = option
        """The value of ``--cpu-level``."""
        self._environment = environment
        self.limits = self._decide()

    def step_down(self) -> None:
        """Go one level lower, now and for later starts; there must be a lower level."""
        assert self.limits.level is not None and self.limits.lower is not None
        self._found = replace(self._found, died_at=(*self._found.died_at, self.limits.level))
        kept.write(KIND, self._found)
        self.limits = self._decide()

    def _decide(self) -> CpuLimits:
        return limit_cpu(
            self._found.findings,
            option=self.asked,
            died_at=self._found.died_at,
            environment=self._environment,
        )


class FindingOut:
    """The findings of an earlier start, or trials that run in a thread, which waits for child programs."""

    def __init__(self, options: DeviceOptions, machine: Machine, run: RunTrials | None) -> None:
        self._options = options
        self._found: KeptFindings | None = None
        self._trials: threading.Thread | None = None
        if options.device in GPU_DEVICES or not machine.is_x86_64:
            return
        environment = dict(os.environ)
        self._found = kept.read(KIND, facts_of(machine, environment), KeptFindings)
        if self._found is None:
            arguments = (machine, environment, run)
            self._trials = threading.Thread(target=self._try_out, args=arguments, name="cpu trials", daemon=True)
            self._trials.start()

    @property
    def is_known(self) -> bool:
        """True if ``choice`` returns at once."""
        return self._trials is None

    def choice(self) -> CpuChoice | None:
        """Wait for the trials and return the limits; None if this kind of machine has no levels."""
        if self._trials is not None:
            self._trials.join()
        if self._found is None:
            return None
        return CpuChoice(self._found, option=self._options.cpu_level, environment=os.environ)

    def _try_out(self, machine: Machine, environment: Mapping[str, str], run: RunTrials | None) -> None:
        """Run the trials, and store their findings."""
        try:
            findings = try_out(machine, environment, run)
        except OSError as error:
            _log.warning("trials of the CPU's instructions did not end: %s", error)
            return
        self._found = KeptFindings(facts=facts_of(machine, environment), findings=findings)
        kept.write(KIND, self._found)


def find_out(options: DeviceOptions, *, machine: Machine | None = None, run: RunTrials | None = None) -> FindingOut:
    """Return the stored findings of this machine, or start the trials. ``run`` replaces the function that runs them."""
    return FindingOut(options, machine or this_machine(), run)


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
