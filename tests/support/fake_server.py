"""quire-engine over ``fake_runner``: the same processes and the same HTTP server, without a model.

    python -m fake_server '{"step_seconds": 0.01}' --model DIR …

The arguments are the fake runner's options as JSON, then quire-engine's own flags. Only the configuration and the
tokenizer of the model folder are read. This is for tests of everything but the model.
"""

import json
import os
import sys
from dataclasses import replace

from quire_engine import flags
from quire_engine.api.http_server import listener_of
from quire_engine.api.serve import serve
from quire_engine.ipc.messages import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.pooling_setup import find_pooling
from quire_engine.text.model_text import load_model_text


def main(argv: list[str]) -> int:
    """Serve until a signal arrives, and return the exit status."""
    options, *rest = argv
    config = flags.parse(rest, os.environ)
    folder = inspect_model_folder(config.model.path, weights=False, overrides=config.model.overrides)
    factory = RunnerFactory(function="fake_runner:load_fake_model", options=json.loads(options))
    config = replace(config, pooling=find_pooling(config))
    text = load_model_text(config.model.path, config.text, config.model.overrides)
    listener = listener_of(config.server)
    return serve(config, folder, text, listener, factory=factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
