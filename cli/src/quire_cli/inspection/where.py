"""The target of ``quire explain`` and ``quire top``: a run of ``quire up`` on this machine, or a cluster.

Without options it is the live run that serves the name, else the cluster that kubectl would use. Both commands share
its options and its errors, and the way in which they run until Ctrl-C.
"""

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from rich.live import Live

from quire_cli.errors import InspectionProblem
from quire_cli.local.state import Run, RunState, run_of, runs
from quire_cli.options import discard_output, section
from quire_common.quantities import format_duration
from quire_operator.api import names
from quire_operator.errors import ClusterProblem, UserError
from quire_operator.kube.errors import ClusterError, Forbidden, NotFound
from quire_operator.kube.objects import Key

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster import KubeReader

_DENIED = re.compile(
    r'cannot (\w+) resource "([^"/]+)(?:/([^"]+))?" in API group "([^"]*)"(?: in the namespace "([^"]+)")?'
)

of_place = section("Cluster or local run")

NamespaceOption = Annotated[
    str | None, of_place("The namespace on the cluster (default: the context's).", names=("--namespace", "-n"))
]
KubeconfigOption = Annotated[str | None, of_place("Path to the kubeconfig file.", metavar="FILE")]
ContextOption = Annotated[str | None, of_place("The context of the kubeconfig to use.", metavar="NAME")]
LocalOption = Annotated[
    bool, of_place("Use runs on this machine only, including runs that have ended.", names=("--local",))
]
RunOption = Annotated[Path | None, of_place("Use the run of this YAML file on this machine.", metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The target according to the command line."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None
    local: bool = False
    run: Path | None = None
    """The YAML file of a live or ended run, or the run's folder."""
    cluster: bool = False
    """True if another option is set that only a cluster supports."""

    def __post_init__(self) -> None:
        if self.is_local and self.is_cluster:
            raise InspectionProblem(
                "--local and --run select this machine; --namespace, --kubeconfig and --context select a cluster",
                hint="use options of one kind only",
            )

    @property
    def is_local(self) -> bool:
        return self.local or self.run is not None

    @property
    def is_cluster(self) -> bool:
        return self.cluster or any(said is not None for said in (self.namespace, self.kubeconfig, self.context))


async def open_target(where: Where, wanted: Sequence[str], environ: Mapping[str, str]) -> "Run | KubeReader":
    """Return the run that serves these names or a connection to the cluster, or raise ``UserError``."""
    run = _chosen_run(where, wanted, environ)
    if run is not None:
        return run
    from quire_cli.inspection.cluster import KubeReader

    try:
        return await KubeReader.connect(where.kubeconfig, where.context)
    except ClusterProblem as error:
        if where.is_cluster:
            raise
        known = runs(environ)
        ended = next((run for run in known if wanted and set(wanted) <= run.state.deployments.keys()), None)
        if ended is not None:
            return ended
        raise _nowhere(error, wanted, known) from error


def _chosen_run(where: Where, wanted: Sequence[str], environ: Mapping[str, str]) -> Run | None:
    """Return the run to inspect, or None for a cluster. Raise ``InspectionProblem`` if a run is required."""
    if where.is_cluster:
        return None
    if where.run is not None:
        run = run_of(where.run, environ)
        if run is None:
            known = [f"{one.state.file} ({'live' if one.is_live else 'ended'})" for one in runs(environ)]
            raise InspectionProblem(
                f"{where.run} is not running, and there is no state of an earlier run",
                details=[f"known: {file}" for file in known],
                hint="--run expects the YAML file of quire up -f",
            )
        _check_names(wanted, run.state.deployments, f"the run of {run.state.file}")
        return run
    found = runs(environ)
    for run in found:
        if (run.is_live or where.local) and set(wanted) <= run.state.deployments.keys():
            return run
    if not where.local:
        return None
    if not found:
        raise InspectionProblem("there has been no run on this machine", hint="quire up -f examples/demo.yaml")
    everything = sorted({name for run in found for name in run.state.deployments})
    _check_names(wanted, everything, "any one run on this machine")
    raise InspectionProblem(
        "no single run on this machine serves all of these", hint="set --run FILE, or use fewer names"
    )


def _nowhere(error: ClusterProblem, wanted: Sequence[str], known: Sequence[Run]) -> UserError:
    """Return the error for the case of no cluster connection and no matching run."""
    served = sorted({name for run in known for name in run.state.deployments})
    asked = " and ".join(wanted) or "an LLMDeployment"
    near = f"among the runs on this machine: {near_names(wanted[0], served)}" if wanted and served else ""
    return InspectionProblem(
        f"no run on this machine serves {asked}, and there is {error.message}",
        details=[near] if near else [],
        hint=error.hint,
    )


def ended_note(state: RunState, now: float) -> str:
    """Return how long ago a run ended, and whether its process died."""
    at = state.time if state.ended is None else state.ended
    ago = format_duration(float(max(0, int(now - at))))
    if state.ended is not None:
        return f"ended {ago} ago"
    return f"process died; last update {ago} ago"


def _check_names(wanted: Sequence[str], known: Mapping[str, object] | Sequence[str], whose: str) -> None:
    for name in wanted:
        if name not in known:
            raise InspectionProblem(f"{whose} does not serve {name}", hint=near_names(name, list(known)))


def only_name(known: Sequence[str], *, where: str) -> str:
    """Return the only name, for a command without a name."""
    if len(known) == 1:
        return known[0]
    if not known:
        raise InspectionProblem(
            f"there is no LLMDeployment in {where}", hint="select another cluster or run; see --help"
        )
    raise InspectionProblem(
        f"{where} has {len(known)} LLMDeployments; name one", details=sorted(known), hint=f"quire explain {known[0]}"
    )


def user_error(error: ClusterError, *, looking_for: str) -> UserError:
    """Return the user error for an error of the API server."""
    text = str(error)
    if isinstance(error, Forbidden):
        return _no_right(text)
    if isinstance(error, NotFound):
        return InspectionProblem(
            f"this cluster has no kind {names.KIND} ({names.PLURAL}.{names.GROUP}), so there is no {looking_for}",
            hint="install quire's chart, or select another cluster with --kubeconfig or --context",
        )
    return ClusterProblem(text, hint="select another cluster with --kubeconfig or --context, or try again")


def _no_right(text: str) -> UserError:
    right = _missing_right(text)
    if right is None:
        return ClusterProblem(text, hint="log in again, or select another user with --context")
    sub = f" --subresource {right.subresource}" if right.subresource else ""
    scope = "--all-namespaces" if right.namespace is None else f"--namespace {right.namespace}"
    question = f"kubectl auth can-i {right.verb} {right.kind}{right.group}{sub} {scope}"
    return InspectionProblem(readable(text), details=[text], hint=f"check the permission with: {question}")


def readable(refusal: str) -> str:
    """Return the API server's refusal as a sentence for the user."""
    right = _missing_right(refusal)
    if right is None:
        return refusal
    resource = f"{right.kind}/{right.subresource}" if right.subresource else right.kind
    where = "in all namespaces" if right.namespace is None else f"in namespace {right.namespace}"
    return f"you are not allowed to {right.verb} {resource}{right.group} {where}"


class _Right(NamedTuple):
    verb: str
    kind: str
    subresource: str | None
    group: str
    """With a leading dot; empty for the core group."""
    namespace: str | None
    """None: the whole cluster."""


def _missing_right(refusal: str) -> _Right | None:
    """Return the permission that a refusal names, or None if it names none."""
    denied = _DENIED.search(refusal)
    if denied is None:
        return None
    verb, kind, subresource, group, namespace = denied.groups()
    return _Right(verb, kind, subresource, f".{group}" if group else "", namespace)


def no_such(key: Key, known: Sequence[str], *, place: str) -> InspectionProblem:
    """Return the error for an LLMDeployment that does not exist."""
    return InspectionProblem(
        f"there is no LLMDeployment {key.name} in namespace {key.namespace} of {place}",
        hint=near_names(key.name, known),
    )


def near_names(name: str, known: Sequence[str]) -> str:
    """Return a hint with similar names."""
    near = get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(sorted(known)[:10])
    more = f" and {len(known) - 10} more" if len(known) > 10 else ""
    return f"there is {shown}{more}" if known else "there is no LLMDeployment"


def now() -> datetime:
    return datetime.now(UTC)


def redrawn(console: Console) -> Live:
    """Return a screen on a terminal that is redrawn in place and stays when the command ends."""
    return Live(console=console, auto_refresh=False, vertical_overflow="crop")


def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run until Ctrl-C, or until the reader of the pipe is gone; neither is an error."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # as after `quire top --json | head`
        discard_output()
