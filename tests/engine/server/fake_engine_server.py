"""quire-engine as it is, over the fake runner: run by ``test_processes`` with quire-engine's own arguments.

Before them stand the runner's options as JSON.
"""

import json
import os
import sys

from quire_engine import flags
from quire_engine.ipc.start_up import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.server.listen import listen
from quire_engine.server.serve import serve
from quire_engine.text.model_text import load_model_text

options, *argv = sys.argv[1:]
config = flags.parse(argv, os.environ)
folder = inspect_model_folder(config.model.path, weights=False)
factory = RunnerFactory(function="quire_engine.core.fake_runner:load_fake_model", options=json.loads(options))
text = load_model_text(config.model.path, config.text)
listener = listen(config.server.host, config.server.port)
sys.exit(serve(config, folder, text, listener, factory=factory))
