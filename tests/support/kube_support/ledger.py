"""The cost of disturbances: for each, the time until the cluster is as specified again, and the number of writes."""

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
    """LLMDeployments that were changed in the meantime."""
    seconds: float
    """The time from the end of the disturbance until everything was as specified."""
    writes: int
    """Mutating requests of operators since the start of the disturbance, without Leases and Events."""
    duplicates: int
    """Objects that were created once too often."""
    kinds: str
    """The kinds of the writes."""


@dataclass(slots=True)
class Ledger:
    """A table that tests fill, shown at the end of a run with `-s`."""

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
    """LLMDeployments of one namespace that are changed together."""

    def __init__(self, space: Namespace, names: Sequence[str]) -> None:
        self.space, self.names = space, names
        self._replicas = 1
        self.begun: Position = space.server.audit.position()

    def make(self, **spec: object) -> None:
        for name in self.names:
            self.space.apply(name, replicas=self._replicas, **spec)
        until(self.is_as_asked, why=lambda: self.space.items("llmdeployments"))

    def begin(self) -> None:
        """Start counting writes."""
        self.begun = self.space.server.audit.position()

    def change(self) -> None:
        """Add one replica to each, and delete the Service of each, which only a resync can notice."""
        self._replicas += 1
        for name in self.names:
            self.space.patch("llmdeployments", name, {"spec": {"replicas": self._replicas}}, manager="kubectl")
            self.space.delete("services", name)

    def is_as_asked(self) -> bool:
        deployments = {item["metadata"]["name"]: item["spec"]["replicas"] for item in self.space.items("deployments")}
        services = set(self.space.names("services"))
        return set(self.names) <= services and all(deployments.get(name) == self._replicas for name in self.names)

    def measure(self, what: str, *, since: float) -> Row:
        """Wait until everything is as specified. The Services were deleted and are created once; or all children."""
        until(self.is_as_asked, why=lambda: what)
        seconds = time.monotonic() - since
        written = self.space.server.audit.mutating_requests(
            self.begun, user_agent="quire-operator", besides=frozenset({"leases", "events"})
        )
        ours = [request for request in written if request.namespace == self.space.name]
        made = Counter(request.uri.partition("?")[0] for request in ours if request.status == 201)
        duplicates = sum(count > ("/services/" in uri) for uri, count in made.items())
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
    """Start the work in its own thread; return a function that waits for it and raises its exception."""
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
