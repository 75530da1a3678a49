"""quire-engine with the fake runner, whose engine process dies when a prompt contains one of these tokens.

    python -m poisonable_engine --model DIR …

A prompt of token ids chooses the kind of death: a crash, a hang, or the SIGKILL that the kernel sends to a process that
runs out of memory.
"""

import os
import signal
import sys
from dataclasses import fields, replace
from threading import Event
from typing import Any

from fake_runner import FakeForward, FakeRunner, load_fake_model

from quire_engine import flags
from quire_engine.api.http_server import listener_of
from quire_engine.api.serve import serve
from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.ports import LoadedModel
from quire_engine.ipc.messages import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.text.model_text import load_model_text

CRASH, HANG, OUT_OF_MEMORY = 4001, 4002, 4003
"""The tokens of each kind of death."""


class PoisonableRunner(FakeRunner):
    """A fake runner that one prompt can kill."""

    def execute(self, batch: Batch) -> FakeForward:
        for token in (CRASH, HANG, OUT_OF_MEMORY):
            if any(token in admission.prompt_token_ids for admission in batch.admitted):
                _die(token)
        return super().execute(batch)


def _die(token: int) -> None:
    if token == HANG:
        Event().wait()
    os.kill(os.getpid(), signal.SIGSEGV if token == CRASH else signal.SIGKILL)


def load(config: EngineConfig, **options: Any) -> LoadedModel:
    """Return the fake model with a runner that can be killed."""
    model = load_fake_model(config, **options)
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    return replace(model, runner=PoisonableRunner(**{each.name: getattr(runner, each.name) for each in fields(runner)}))


def main(argv: list[str]) -> int:
    """Serve until a signal arrives, and return the exit status."""
    config = flags.parse(argv, os.environ)
    folder = inspect_model_folder(config.model.path, weights=False)
    options = {"vocab_size": 4096, "step_seconds": 0.01}
    factory = RunnerFactory(function="poisonable_engine:load", options=options)
    text = load_model_text(config.model.path, config.text)
    return serve(config, folder, text, listener_of(config.server), factory=factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
