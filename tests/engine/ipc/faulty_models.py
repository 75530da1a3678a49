"""Models that go wrong, for the engine process to load by ``RunnerFactory``."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.fake_runner import FakeForward, FakeRunner, load_fake_model
from quire_engine.core.ports import LoadedModel
from quire_engine.core.stall_bound import StepCosts
from quire_engine.errors import ModelFolderError


def load_missing(config: EngineConfig) -> LoadedModel:
    raise ModelFolderError(f"no model folder at {config.model.path}")


def load_broken(config: EngineConfig) -> LoadedModel:
    raise RuntimeError("wires crossed")


def load_vanishing(config: EngineConfig) -> LoadedModel:
    os._exit(3)


def load_forever(config: EngineConfig) -> LoadedModel:
    while True:
        time.sleep(60)


def load_refused(config: EngineConfig, *, works_at: str) -> LoadedModel:
    """The CPU refuses an instruction at every level but one."""
    if config.cpu is None or config.cpu.level != works_at:
        os.kill(os.getpid(), signal.SIGILL)
    return load_fake_model(config)


def load_once(config: EngineConfig, *, once: str) -> LoadedModel:
    """The first process is as it should be; those after it load for ever."""
    if Path(once).exists():
        load_forever(config)
    Path(once).touch()
    return load_fake_model(config)


class FailingRunner(FakeRunner):
    def execute(self, batch: Batch) -> FakeForward:
        if self.steps == 3:
            raise RuntimeError("the third step was too much")
        return super().execute(batch)


def load_slow(config: EngineConfig, *, step_seconds: float, expected_seconds: float) -> LoadedModel:
    """Every step takes long, and the warm-up measured how long."""
    costs = StepCosts(fixed=expected_seconds, per_token=1e-6, per_pair=1e-9)
    return replace(load_fake_model(config, step_seconds=step_seconds), step_costs=costs)


def load_failing_later(config: EngineConfig) -> LoadedModel:
    """Its fourth step fails."""
    model = load_fake_model(config)
    return replace(model, runner=FailingRunner(layout=model.layout, vocab_size=model.vocab_size))
