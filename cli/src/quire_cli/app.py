"""The ``quire`` command: read the command line, call one function, print its result."""

import errno
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.text import Text

from quire_cli import __version__
from quire_cli.options import discard_output
from quire_operator.errors import UserError

_MAX_DETAILS = 30
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSES_ON: Mapping[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


class _Commands(typer.core.TyperGroup):
    """The commands, whose modules are imported only for the command that runs: all of them take a second."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _IMPORTED:
            module, settings = _IMPORTED[name]
            whole = typer.Typer(add_completion=False, rich_markup_mode="rich")
            whole.command(name, **settings)(getattr(import_module(module), name))
            command = typer.main.get_command(whole)
        return name, command, rest


_IMPORTED: dict[str, tuple[str, Mapping[str, Any]]] = {}
"""For each command the module with the function of its name, and its settings."""

app = typer.Typer(
    cls=_Commands,
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


def _imported(name: str, module: str, summary: str, **settings: Any) -> None:
    """Add a command of another module; ``summary`` is the first sentence of its own help."""
    _IMPORTED[name] = module, settings
    app.command(name, help=summary)(lambda: None)


_imported(
    "up",
    "quire_cli.local.up",
    "Serve the LLMDeployments of a file on this machine. Ctrl-C drains, a second Ctrl-C exits at once.",
    no_args_is_help=True,
)
_imported(
    "plan",
    "quire_cli.local.plan",
    "Show the memory a model needs, and how many tokens and sequences fit. Starts no engine.",
    no_args_is_help=True,
)
_imported(
    "explain",
    "quire_cli.inspection.explain",
    "Explain the number of replicas of an LLMDeployment: the last decisions, each with its figures.",
)
_imported(
    "top",
    "quire_cli.inspection.top",
    "Show the current load of LLMDeployments: queue, running, KV cache usage, tokens per second, time to first token.",
)
_imported(
    "simulate",
    "quire_cli.simulation.command",
    "Replay a trace against an autoscaling policy, in seconds and without an engine.",
    no_args_is_help=True,
)
_imported(
    "fetch",
    "quire_cli.local.model_store",
    "Download a model from a hub or a bucket. Needs the engine, whose command quire-fetch it runs.",
    **_PASSES_ON,
)


@app.command(hidden=True, **_PASSES_ON)
def bench() -> None:
    """Refuse the command of earlier versions."""
    raise UserError(
        "quire bench was removed", hint="Use `vllm bench serve --backend openai --base-url http://…` or guidellm."
    )


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
        discard_output()
        sys.exit(1)
