"""Several operators: one acts, the others stand by; and how soon the next one takes over."""

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.audit import AuditedRequest, Position
from quire_cluster.control_plane import ControlPlane

LAPSE_SECONDS = 15.0
"""The time that a candidate waits for a Lease that is neither released nor renewed."""


@pytest.fixture
def new_space(crd_installed: ControlPlane) -> Iterator[Callable[[], Namespace]]:
    made: list[str] = []

    def new() -> Namespace:
        made.append(f"lead-{uuid.uuid4().hex[:8]}")
        answer = crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": made[-1]}})
        assert answer.ok, answer.body
        return Namespace(crd_installed, made[-1])

    yield new
    for name in made:
        crd_installed.client().delete(f"/api/v1/namespaces/{name}")


class Pair:
    """Two operators of one namespace: `first` leads, `second` stands by."""

    def __init__(self, operators: Operators, space: Namespace, *, stop_before_write: int | None = None) -> None:
        self.space = space
        self.first = operators.start(
            *space.flags(), identity=f"{space.name}-1", before_write=stop_before_write, then=signal.SIGSTOP
        )
        space.wait_holder(self.first.identity)
        self.second = operators.start(*space.flags(), identity=f"{space.name}-2")

    def end(self) -> None:
        for operator in (self.first, self.second):
            operator.send(signal.SIGKILL)

    def wait_scaled(self, replicas: int) -> None:
        """Wait until the Deployment requests that many replicas, which shows that an operator acted."""

        def asked() -> int:
            return int((self.space.get("deployments", "chat") or {"spec": {"replicas": -1}})["spec"]["replicas"])

        until(lambda: asked() == replicas, why=asked)

    def vacancy(self, since: Position) -> float:
        """Return the seconds between the last Lease write of the first and the takeover, by the server's clock."""
        asked = self.space.server.audit.mutating_requests(since)
        leases = [request for request in asked if request.resource == "leases" and request.status in (200, 201)]
        last = [r.received for r in leases if self.first.identity in r.user_agent][-1]
        taken = next(r.received for r in leases if self.second.identity in r.user_agent)
        return (datetime.fromisoformat(taken) - datetime.fromisoformat(last)).total_seconds()

    def writes(self, operator: OperatorProcess, since: Position) -> list[AuditedRequest]:
        written = self.space.server.audit.mutating_requests(since, user_agent=operator.identity)
        return [request for request in written if request.resource != "leases"]


def test_stopped_leader_hands_over_to_the_standby(new_space: Callable[[], Namespace], operators: Operators) -> None:
    pair = Pair(operators, new_space())
    start = pair.space.server.audit.position()
    pair.space.apply(replicas=1)
    pair.space.wait_settled("chat")
    assert pair.writes(pair.first, start) and not pair.writes(pair.second, start)

    pair.first.terminate()
    began = time.monotonic()
    pair.space.apply(replicas=2)
    pair.wait_scaled(2)
    took = time.monotonic() - began
    print(f"acting again {took:.2f} s after SIGTERM")
    assert pair.space.holder() == pair.second.identity
    assert pair.vacancy(start) < LAPSE_SECONDS, "it was released, so the second did not wait for it to expire"
    until(lambda: not pair.first.is_alive)
    pair.end()


def test_killed_or_paused_leader_is_replaced_and_stops_writing(
    new_space: Callable[[], Namespace], operators: Operators
) -> None:
    """Both at once, since each waits for the Lease to expire. The paused one stops at the worst moment."""
    spaces = new_space(), new_space()
    start = spaces[0].server.audit.position()
    killed, paused = Pair(operators, spaces[0]), Pair(operators, spaces[1], stop_before_write=1)
    killed.space.apply(replicas=1)
    killed.space.wait_settled("chat")

    killed.first.kill()
    began = time.monotonic()
    killed.space.apply(replicas=2)
    paused.space.apply(replicas=1)
    until(lambda: paused.first.writes())  # and there it stops
    killed.wait_scaled(2)
    print(f"acting again {time.monotonic() - began:.2f} s after SIGKILL")
    paused.wait_scaled(1)
    print(f"acting again {time.monotonic() - began:.2f} s after SIGSTOP")
    for pair in (killed, paused):
        assert pair.vacancy(start) >= LAPSE_SECONDS, "it is not taken from one who may still act"

    paused.space.wait_settled("chat")
    resumed = paused.space.server.audit.position()
    paused.first.resume()
    told = "the lease was not renewed in time"
    until(lambda: any(told in line.get("message", "") for line in paused.first.lines()), why=paused.first.lines)
    paused.space.apply(replicas=3)
    paused.wait_scaled(3)
    until(
        lambda: any(
            "leases" in r.resource
            for r in paused.space.server.audit.requests(resumed, user_agent=paused.first.identity)
        )
    )
    assert paused.writes(paused.first, resumed) == [], "it campaigns again, and writes nothing"
    assert paused.writes(paused.second, resumed) != []
    killed.end()
    paused.end()
