"""Models that fail, for the engine process to load by ``RunnerFactory``."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from fake_runner import FakeForward, FakeRunner, load_fake_model

from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
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
    """Load a model on a CPU that rejects an instruction at every level except one."""
    if config.cpu is None or config.cpu.level != works_at:
        os.kill(os.getpid(), signal.SIGILL)
    return load_fake_model(config)


def load_once(config: EngineConfig, *, once: str) -> LoadedModel:
    """Load normally in the first process and hang in all later ones."""
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
    """Load a model whose steps take long, and whose warm-up measured another duration."""
    costs = StepCosts(fixed=expected_seconds, per_token=1e-6, per_pair=1e-9)
    return replace(load_fake_model(config, step_seconds=step_seconds), step_costs=costs)


def load_failing_later(config: EngineConfig) -> LoadedModel:
    """Load a model whose fourth step fails."""
    model = load_fake_model(config)
    return replace(model, runner=FailingRunner(layout=model.layout, vocab_size=model.vocab_size))
