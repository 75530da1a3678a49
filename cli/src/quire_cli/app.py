"""The ``quire`` command: read the command line, call one function, print its result."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from quire_cli import __version__
from quire_cli.errors import StartProblem
from quire_cli.inspection.explain import explain
from quire_cli.inspection.screen import plain_console
from quire_cli.inspection.top import top
from quire_cli.local import plan as planning
from quire_cli.local.documents import read_manifests
from quire_cli.local.host import installed, installed_commands
from quire_cli.local.machine import this_machine, with_tried_cpu
from quire_cli.local.model_store import ModelStore
from quire_cli.local.up import Up, UpOptions
from quire_cli.local.views import JsonLines, LiveTable, View
from quire_cli.options import DURATION, URL
from quire_cli.simulation.command import simulate
from quire_common.contract.engine import ENGINE_COMMAND, FETCH_COMMAND
from quire_common.model_source import cache_home
from quire_common.quantities import parse_bytes
from quire_operator.errors import UserError

_MAX_DETAILS = 30
_FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Serve large language models from one file: the same LLMDeployment on this machine and on Kubernetes.

[bold]quire up -f examples/demo.yaml[/bold]
    serve it on this machine: an OpenAI-compatible address, with replicas that scale by load

[bold]quire explain chat[/bold]
    explain the number of replicas, on this machine or on a cluster

[bold]quire top[/bold]
    show the current load: queue, KV cache usage, tokens per second, time to first token

[bold]quire plan -f examples/demo.yaml --gpu "H100 80GB"[/bold]
    show the memory it needs, and how many tokens and sequences fit

[bold]quire simulate --trace azure_llm_2023_code.csv --policy chat.yaml[/bold]
    replay a trace against an autoscaling policy, without an engine
""",
)
app.command("explain")(explain)
app.command("top")(top)
app.command("simulate", no_args_is_help=True)(simulate)


def _version(value: bool) -> None:
    if value:
        print(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command(
    hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench() -> None:
    """Refuse the command of earlier versions."""
    raise UserError(
        "quire bench was removed", hint="Use `vllm bench serve --backend openai --base-url http://…` or guidellm."
    )


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise typer.BadParameter(f'"{text}" is not an amount of memory such as 24Gi')
    return size


FileOption = Annotated[Path, typer.Option("--file", "-f", help="A YAML file with one or more LLMDeployments.")]


@app.command(no_args_is_help=True)
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


def _leave_unwritten() -> None:
    """Keep the interpreter from writing again to a pipe without a reader, or to a full disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_unread() -> None:
    """End this process in the way a user would."""
    _leave_unwritten()
    os.kill(os.getpid(), signal.SIGTERM)


async def _up(options: UpOptions, view: View) -> None:
    run = Up(options, view)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, run.stop)
    await run.run()


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def fetch(context: typer.Context) -> None:
    """Download a model from a hub, a bucket or a registry. Needs the engine, whose command quire-fetch it runs."""
    command = installed(FETCH_COMMAND)
    os.execv(command, [command, *context.args])


@app.command(no_args_is_help=True)
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


def _show_error(error: UserError) -> None:
    """Print an error on one screen: the problem, the details and the remedy."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("quire: ", "bold red"), error.message))
    for detail in error.details[:_MAX_DETAILS]:
        console.print(Text(f"  {detail}"))
    if len(error.details) > _MAX_DETAILS:
        console.print(Text(f"  … and {len(error.details) - _MAX_DETAILS} more"))
    if error.hint:
        console.print(Text(error.hint))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: a user error ends with one screen and exit code 2, a bug with a traceback."""
    try:
        app(argv)
    except UserError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _show_error(UserError(f"{error.filename or 'the output'} cannot be written: {error.strerror}"))
        _leave_unwritten()
        sys.exit(1)


if __name__ == "__main__":
    main()
