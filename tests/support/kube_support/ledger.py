"""What disturbances cost: for each, how long until the cluster is as asked again, and how many writes that took."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kube_support.operators import Namespace, until

from quire_cluster.audit import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    objects: int
    """LLMDeployments that were changed meanwhile."""
    seconds: float
    """From when the disturbance ended until all was as asked."""
    writes: int
    """Mutating requests of operators since the disturbance began, without Leases and Events."""
    duplicates: int
    """Objects that were made once more than was asked for."""
    kinds: str
    """What the writes were."""


@dataclass(slots=True)
class Ledger:
    """Filled by tests, shown at the end of a run with `-s`."""

    rows: list[Row] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Row) -> Row:
        with self._lock:
            self.rows.append(row)
        return row

    def table(self) -> str:
        head = f"{'disturbance':62} {'objects':>7} {'in sync after':>13} {'writes':>6} {'duplicates':>10}"
        lines = [
            f"{r.what:62} {r.objects:7} {r.seconds:11.1f} s {r.writes:6} {r.duplicates:10}"
            for r in sorted(self.rows, key=lambda row: row.what)
        ]
        return "\n".join([head, *lines])


class Flock:
    """Some LLMDeployments of one namespace that are changed together."""

    def __init__(self, space: Namespace, names: Sequence[str]) -> None:
        self.space, self.names = space, names
        self._replicas = 1
        self.begun: Position = space.server.audit.position()

    def make(self, **spec: object) -> None:
        for name in self.names:
            self.space.apply(name, replicas=self._replicas, **spec)
        until(self.is_as_asked, why=lambda: self.space.items("llmdeployments"))

    def begin(self) -> None:
        """What is written from here on is counted."""
        self.begun = self.space.server.audit.position()

    def change(self) -> None:
        """One replica more for each; and the Service of each is deleted, which only a look at everything can tell."""
        self._replicas += 1
        for name in self.names:
            self.space.patch("llmdeployments", name, {"spec": {"replicas": self._replicas}}, manager="kubectl")
            self.space.delete("services", name)

    def is_as_asked(self) -> bool:
        deployments = {item["metadata"]["name"]: item["spec"]["replicas"] for item in self.space.items("deployments")}
        services = set(self.space.names("services"))
        return set(self.names) <= services and all(deployments.get(name) == self._replicas for name in self.names)

    def measure(self, what: str, *, since: float, makes_all: bool = False) -> Row:
        """Waits until all is as asked. The Services were deleted and are made once; or all, which was not there."""
        until(self.is_as_asked, why=lambda: what)
        seconds = time.monotonic() - since
        written = self.space.server.audit.mutating_requests(
            self.begun, user_agent="quire-operator", besides=frozenset({"leases", "events"})
        )
        ours = [request for request in written if request.namespace == self.space.name]
        made = Counter(request.uri.partition("?")[0] for request in ours if request.status == 201)
        duplicates = sum(count > (makes_all or "/services/" in uri) for uri, count in made.items())
        kinds = Counter(f"{request.verb} {request.resource} {request.status}" for request in ours)
        return Row(
            what=what,
            objects=len(self.names),
            seconds=seconds,
            writes=len(ours),
            duplicates=duplicates,
            kinds=str(dict(kinds)),
        )


def elsewhere(work: Callable[[], Row]) -> Callable[[], Row]:
    """Begins the work in a thread of its own; what is returned waits for it, and raises what it raised."""
    outcome: list[Row | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Row:
        thread.join()
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    return wait
