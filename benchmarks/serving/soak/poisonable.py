"""quire-engine with its real runner, whose engine process dies when a prompt repeats one of these tokens.

Started by ``servers``. The token chooses the kind of death: a crash, a hang, or the SIGKILL that the kernel sends to a
process that runs out of memory. Before it dies, the engine process writes ``MARK`` to its log.
"""

import os
import signal
import sys
from dataclasses import replace
from threading import Event

from quire_engine import flags
from quire_engine.api.http_server import listener_of
from quire_engine.api.serve import serve
from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.ports import ForwardPass, LoadedModel, Runner
from quire_engine.ipc.messages import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.runner import load_model
from quire_engine.text.model_text import load_model_text

POISONS = {"crash": 4001, "hang": 4002, "out of memory": 4003}
REPEATS = 8
"""The repetitions of the token in one prompt that make it poisonous, so that no text is so by accident."""
MARK = "a poisonous request arrived"


class PoisonableRunner:
    """A runner that one prompt can kill."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def execute(self, batch: Batch) -> ForwardPass:
        for admission in batch.admitted:
            for kind, token in POISONS.items():
                if admission.prompt_token_ids.count(token) >= REPEATS:
                    _die(kind)
        return self._runner.execute(batch)

    def close(self) -> None:
        self._runner.close()


def _die(kind: str) -> None:
    print(f"{MARK}: {kind}", file=sys.stderr, flush=True)
    if kind == "hang":
        Event().wait()
    os.kill(os.getpid(), signal.SIGSEGV if kind == "crash" else signal.SIGKILL)


def load(config: EngineConfig) -> LoadedModel:
    """Return the model with a runner that can be killed."""
    model = load_model(config)
    return replace(model, runner=PoisonableRunner(model.runner))


def main(argv: list[str]) -> int:
    """Serve until a signal arrives, and return the exit status."""
    config = flags.parse(argv, os.environ)
    folder = inspect_model_folder(config.model.path, weights=True)
    text = load_model_text(config.model.path, config.text)
    factory = RunnerFactory(function="benchmarks.serving.soak.poisonable:load")
    return serve(config, folder, text, listener_of(config.server), factory=factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
