"""The commands ``quire up``, ``quire plan`` and ``quire fetch``."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire_cli.errors import StartProblem
from quire_cli.local import plan as planning
from quire_cli.local.documents import read_manifests
from quire_cli.local.machine import installed, installed_commands, this_machine, with_tried_cpu
from quire_cli.local.model_store import ModelStore
from quire_cli.local.up import Up, UpOptions
from quire_cli.local.views import JsonLines, LiveTable, View
from quire_cli.options import DURATION, URL, discard_output, plain_console
from quire_common.contract.engine import ENGINE_COMMAND, FETCH_COMMAND
from quire_common.model_source import cache_home
from quire_common.quantities import parse_bytes

FileOption = Annotated[Path, typer.Option("--file", "-f", help="A YAML file with one or more LLMDeployments.")]


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise typer.BadParameter(f'"{text}" is not an amount of memory such as 24Gi')
    return size


def up(
    file: FileOption,
    port: Annotated[int, typer.Option(help="The port to listen on, at 127.0.0.1.", min=1, max=65535)] = 8000,
    exit_after: Annotated[
        float | None,
        typer.Option(help="Drain and exit this long after the address is ready.", show_default=False, **DURATION),
    ] = None,
    prometheus_url: Annotated[
        str | None,
        typer.Option(
            help="Scale by the metrics of this Prometheus, which finds the replicas in the run's folder"
            " (prometheus-targets.json, for file_sd_configs). Without it the replicas are scraped directly.",
            show_default=False,
            **URL,
        ),
    ] = None,
) -> None:
    """Serve the LLMDeployments of a file on this machine. Ctrl-C drains, a second Ctrl-C exits at once.

    Starts an engine process per replica and a gateway in front of them, and scales by spec.autoscaling. On a terminal
    it shows a live table, elsewhere one JSON object per line. The file is read once: to apply a change, restart
    quire up.

      quire up -f examples/demo.yaml

      quire up -f examples/demo.yaml --port 9000 --exit-after 10m

      curl http://127.0.0.1:8000/v1/models
    """
    options = UpOptions(
        file=file,
        port=port,
        exit_after_seconds=exit_after,
        prometheus_url=prometheus_url,
        environ=os.environ,
        commands=installed_commands(),
    )
    console = Console()
    view: View = LiveTable(console) if console.is_terminal else JsonLines(sys.stdout, on_gone=_end_unread)
    try:
        asyncio.run(_up(options, view))
    finally:
        view.close()


def _end_unread() -> None:
    """End this process in the way a user would."""
    discard_output()
    os.kill(os.getpid(), signal.SIGTERM)


async def _up(options: UpOptions, view: View) -> None:
    run = Up(options, view)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, run.stop)
    await run.run()


def fetch(context: typer.Context) -> None:
    """Download a model from a hub or a bucket. Needs the engine, whose command quire-fetch it runs."""
    command = installed(FETCH_COMMAND)
    os.execv(command, [command, *context.args])


def plan(
    file: FileOption,
    gpu: Annotated[str | None, typer.Option(help='The name of a GPU, such as "H100 80GB".', show_default=False)] = None,
    memory: Annotated[
        int | None,
        typer.Option(help="The memory for one replica.", parser=_memory, metavar="SIZE", show_default=False),
    ] = None,
) -> None:
    """Show the memory a model needs, and how many tokens and sequences fit. Starts no engine.

    Reads the model's configuration and the headers of its weights; downloads no weights. Without --gpu or --memory it
    checks all known GPUs if the spec requests one, else this machine. Exits with 1 if the model fits nowhere.

      quire plan -f llama.yaml --gpu "H100 80GB"

      quire plan -f examples/demo.yaml --memory 4Gi
    """
    if gpu is not None and memory is not None:
        raise typer.BadParameter("set --gpu or --memory, not both")
    machine = this_machine()
    if gpu is None and memory is None:
        with suppress(StartProblem):  # a machine that only plans may have no engine
            machine = asyncio.run(with_tried_cpu(machine, (installed(ENGINE_COMMAND),)))
    store = ModelStore(base=file.resolve().parent, cache=cache_home(os.environ))
    console = plain_console()
    everything_fits = True
    specs = read_manifests(file).deployments
    for spec in specs:
        facts = store.facts(spec.model.source, weights_needed=not spec.engine.invents_weights)
        draft = store.draft_facts(spec)
        where = planning.places(spec, specs, gpu=gpu, memory_bytes=memory, machine=machine)
        found = planning.answers(spec, facts, where, machine=machine, draft=draft)
        everything_fits &= any(answer.fits for answer in found)
        console.print(planning.render(spec, facts, found, draft=draft))
    if not everything_fits:
        raise typer.Exit(1)
