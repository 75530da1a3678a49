"""The command ``quire-engine``: it reads flags and environment, then serves. A user error never shows a traceback."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic

from quire_common.errors import ConfigurationError
from quire_common.model_source import cache_home
from quire_engine import __version__, flags
from quire_engine.api.http_server import listener_of
from quire_engine.config import DeviceOptions, EngineConfig
from quire_engine.cpu.choice import CpuChoice, CpuFindings, report
from quire_engine.download import fetch_model, remote_source
from quire_engine.errors import EngineStartError, FetchError, StartError
from quire_engine.fetch.version_lock import hold
from quire_engine.flag_table import FLAGS
from quire_engine.group_secret import check_secret
from quire_engine.ipc.messages import RunnerFactory
from quire_engine.ipc.process import Spawned, spawn
from quire_engine.model_folder import check_model_len, inspect_model_folder, pinned
from quire_engine.pooling_setup import find_pooling
from quire_engine.text.model_text import load_model_text


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(FLAGS.help_text(shutil.get_terminal_size((100, 24)).columns), end="")
        return 0
    if "--version" in argv:
        print(f"quire-engine {__version__}")
        return 0
    if "--flag-schema" in argv:
        print(json.dumps(FLAGS.schema(), indent=2))
        return 0
    began = monotonic()
    try:
        if argv == ["--cpu-report"]:
            print(json.dumps(report(CpuFindings(DeviceOptions()).choice()), indent=2))
            return 0
        config = flags.parse(argv, os.environ)
        config = _with_local_model(config)
        # Errors in flags, folder or port are reported before the libraries of the server are loaded.
        folder = inspect_model_folder(
            config.model.path, weights=config.model.load_format != "dummy", overrides=config.model.overrides
        )
        check_model_len(folder, config.model.max_model_len)
        config = replace(config, pooling=find_pooling(config))
        check_secret(config.parallel, os.environ)
        hold_models(config)
        listener = listener_of(config.server)
        # One request's text is encoded on one core: more threads would compete with those of the engine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # torch takes longest: the engine process loads it while this one loads the tokenizer and the server. At the
        # first start on a machine the CPU is tested meanwhile, and the engine process is started then.
        findings = CpuFindings(config.device)
        with _ended_by_sigterm(), ExitStack() as stack:
            cpu = findings.choice() if findings.is_known else None
            if config.parallel.node_rank:
                return _serve_node(config, listener, stack, cpu or findings.choice(), began)
            engine = stack.enter_context(_spawned(config, cpu)) if findings.is_known else None
            text = load_model_text(config.model.path, config.text, config.model.overrides)
            from quire_engine.api.serve import serve

            if engine is None:
                cpu = findings.choice()
                engine = stack.enter_context(_spawned(config, cpu))
            return serve(config, folder, text, listener, spawned=engine, cpu=cpu, began=began)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ConfigurationError as error:
        print(_problems(error), file=sys.stderr)
        return error.exit_code
    except FetchError as error:
        print("\n  ".join(filter(None, (f"quire-engine: {error}", *error.details, error.hint))), file=sys.stderr)
        return error.exit_code
    except EngineStartError as error:
        return error.exit_code  # the supervisor has logged the message of the engine process
    except StartError as error:
        print(f"quire-engine: {error}", file=sys.stderr)
        return error.exit_code


def _serve_node(
    config: EngineConfig, listener: socket.socket, stack: ExitStack, cpu: CpuChoice | None, began: float
) -> int:
    """Serve the probes of a node whose ranks join the group of another node."""
    engine = stack.enter_context(_spawned(config, cpu))
    from quire_engine.api.node import serve_node

    return serve_node(config, listener, spawned=engine, cpu=cpu, began=began)


def _with_local_model(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a folder of this machine; a model of another place is downloaded first."""
    config = _with_local_draft(config)
    source = remote_source(config.model.path, config.model.revision)
    if source is None:
        return replace(config, model=replace(config.model, path=pinned(config.model.path)))
    with _ended_by_sigterm():
        folder = fetch_model(source, config.model.download_dir or cache_home(os.environ))
    names = config.server.served_model_names or (str(config.model.path),)
    return replace(
        config, model=replace(config.model, path=folder), server=replace(config.server, served_model_names=names)
    )


def _with_local_draft(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a draft model on this machine, or without one that is missing and not required."""
    options = config.speculation
    if options is None or options.model is None:
        return config
    try:
        source = remote_source(options.model, None)
        if source is None:
            return config
        with _ended_by_sigterm():
            folder = fetch_model(source, config.model.download_dir or cache_home(os.environ))
    except FetchError as error:
        if options.required:
            raise
        print(f"quire-engine: serves without speculation: --spec-model {options.model}: {error}", file=sys.stderr)
        return replace(config, speculation=None)
    return replace(config, speculation=replace(options, model=folder))


def hold_models(config: EngineConfig) -> None:
    """Keep the versions of the model and of the draft model in a cache until the process ends."""
    hold(config.model.path)
    if config.speculation is not None and config.speculation.model is not None:
        hold(config.speculation.model)


def _spawned(config: EngineConfig, cpu: CpuChoice | None) -> Spawned:
    try:
        return spawn(replace(config, cpu=None if cpu is None else cpu.limits), RunnerFactory())
    except OSError as error:
        raise StartError(f"the engine process cannot be started: {error}") from error


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End what was started when SIGTERM arrives before the server handles it; PID 1 would otherwise ignore it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _problems(error: ConfigurationError) -> str:
    lines = "\n".join(f"  {problem}" for problem in error.problems)
    return f"quire-engine cannot start:\n{lines}\n\nquire-engine --help lists every flag."


if __name__ == "__main__":
    sys.exit(main())
