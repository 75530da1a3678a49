"""Where ``quire explain`` and ``quire top`` look: a run of ``quire up`` on this machine, or a cluster.

Without a word from the person: the live run here that serves the name, else the cluster that kubectl would ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire_cli.errors import InspectionProblem
from quire_cli.inspection.explanation import near_names
from quire_cli.inspection.rights import in_words, missing_right
from quire_cli.local.run_state import RunState
from quire_cli.local.runs import Run, run_of, runs
from quire_common.quantities import format_duration
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.resource import names
from quire_operator.errors import ClusterProblem, UserError
from quire_operator.ports import ClusterError, Forbidden, NotFound

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster_reading import KubeReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What the command line says of it."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None
    local: bool = False
    run: Path | None = None
    """A YAML file that is or was up, or the folder of its run."""
    cluster: bool = False
    """Something else was said that only a cluster has."""

    def __post_init__(self) -> None:
        if self.is_local and self.is_cluster:
            raise InspectionProblem(
                "--local and --run look at this machine, --namespace, --kubeconfig and --context at a cluster",
                hint="give one kind or the other",
            )

    @property
    def is_local(self) -> bool:
        return self.local or self.run is not None

    @property
    def is_cluster(self) -> bool:
        return self.cluster or any(said is not None for said in (self.namespace, self.kubeconfig, self.context))


def chosen_run(where: Where, wanted: Sequence[str], environ: Mapping[str, str]) -> Run | None:
    """The run to look at; None to look at a cluster. Raises ``InspectionProblem`` where only a run would do."""
    if where.is_cluster:
        return None
    if where.run is not None:
        run = run_of(where.run, environ)
        if run is None:
            known = [f"{one.state.file} ({'live' if one.is_live else 'ended'})" for one in runs(environ)]
            raise InspectionProblem(
                f"{where.run} is not up, and no earlier run of it left a state",
                details=[f"known: {file}" for file in known],
                hint="--run takes the YAML file that was given to quire up -f",
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
        raise InspectionProblem("nothing was ever up on this machine", hint="quire up -f examples/demo.yaml")
    everything = sorted({name for run in found for name in run.state.deployments})
    _check_names(wanted, everything, "any one run on this machine")
    raise InspectionProblem("no one run on this machine serves all of these", hint="give --run FILE, or fewer names")


def ended_run(where: Where, wanted: Sequence[str], environ: Mapping[str, str]) -> Run | None:
    """The newest that is over, for when there is no cluster either."""
    if where.is_cluster:
        return None
    return next((run for run in runs(environ) if wanted and set(wanted) <= run.state.deployments.keys()), None)


def nowhere(error: ClusterProblem, where: Where, wanted: Sequence[str], environ: Mapping[str, str]) -> UserError:
    """There is no way to a cluster, and no run here serves what is wanted."""
    if where.is_cluster:
        return error
    known = sorted({name for run in runs(environ) for name in run.state.deployments})
    asked = " and ".join(wanted) or "anything now"
    near = f"of the runs here: {near_names(wanted[0], known)}" if wanted and known else ""
    return InspectionProblem(
        f"nothing on this machine serves {asked}, and there is {error.message}",
        details=[near] if near else [],
        hint=error.hint,
    )


def ended_note(state: RunState, now: float) -> str:
    """How long a run has been over, and whether it ended or was killed."""
    at = state.time if state.ended is None else state.ended
    ago = format_duration(float(max(0, int(now - at))))
    if state.ended is not None:
        return f"ended {ago} ago"
    return f"was killed: its process is gone; its last word is {ago} old"


def _check_names(wanted: Sequence[str], known: Mapping[str, object] | Sequence[str], whose: str) -> None:
    for name in wanted:
        if name not in known:
            raise InspectionProblem(f"{whose} serves no {name}", hint=near_names(name, list(known)))


def only_name(known: Sequence[str], *, where: str) -> str:
    """The one there is, for a person who named none."""
    if len(known) == 1:
        return known[0]
    if not known:
        raise InspectionProblem(f"there is no LLMDeployment in {where}", hint="name another place; see --help")
    raise InspectionProblem(
        f"{where} has {len(known)} LLMDeployments: which one?", details=sorted(known), hint=f"quire explain {known[0]}"
    )


def user_error(error: ClusterError, *, looking_for: str) -> UserError:
    """What a person can do about an answer of the API server."""
    text = str(error)
    if isinstance(error, Forbidden):
        return _no_right(text)
    if isinstance(error, NotFound):
        return InspectionProblem(
            f"this cluster knows no {names.KIND} ({names.PLURAL}.{names.GROUP}), so there is no {looking_for}",
            hint="install quire's chart, or name another cluster by --kubeconfig or --context",
        )
    return ClusterProblem(text, hint="name another cluster by --kubeconfig or --context, or try again")


def _no_right(text: str) -> UserError:
    right = missing_right(text)
    if right is None:
        return ClusterProblem(text, hint="log in again, or name another user by --context")
    return InspectionProblem(
        in_words(text), details=[text], hint=f"{right.question} tells when somebody has given it to you"
    )


def no_such(key: Key, known: Sequence[str], *, place: str) -> InspectionProblem:
    return InspectionProblem(
        f"there is no LLMDeployment {key.name} in namespace {key.namespace} of {place}",
        hint=near_names(key.name, known),
    )


async def connected(where: Where) -> "KubeReader":
    """Raises ``ClusterProblem``."""
    from quire_cli.inspection.cluster_reading import KubeReader

    return await KubeReader.connect(where.kubeconfig, where.context)
