"""quire-engine as it is, over ``core.fake_runner``: real processes and real HTTP, but no model behind them.

    python -m quire_engine.server.fake '{"step_seconds": 0.01}' --model DIR …

The fake runner's options as JSON, then quire-engine's own flags; of the folder only config and tokenizer are read. For
tests and benchmarks of what is around the model: no flag leads here.
"""

import json
import os
import sys

from quire_engine import flags
from quire_engine.ipc.start_up import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.server.http.listen import listener_of
from quire_engine.server.serve import serve
from quire_engine.text.model_text import load_model_text


def main(argv: list[str]) -> int:
    options, *rest = argv
    config = flags.parse(rest, os.environ)
    folder = inspect_model_folder(config.model.path, weights=False)
    factory = RunnerFactory(function="quire_engine.core.fake_runner:load_fake_model", options=json.loads(options))
    text = load_model_text(config.model.path, config.text)
    listener = listener_of(config.server)
    return serve(config, folder, text, listener, factory=factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
