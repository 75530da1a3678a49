"""To zero replicas and back on a real API server: the gateway is a pod there and answers here."""

import json
import time
from collections.abc import Iterator

import pytest
from kube_support.operators import Namespace, OperatorProcess, until
from kube_support.replicas import IDLE, engines_at
from page_server import page_server

from quire_common.contract import engine
from quire_common.contract.gateway import REQUESTS_PATH

GATEWAY_IP, ENGINE_IP = "127.0.78.1", "127.0.78.2"
PORT = engine.HTTP_PORT


class Gateway:
    """A gateway with the endpoint that the operator polls."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}

    def answer(self, path: str) -> tuple[int, str]:
        names = self.held.keys() | self.in_flight.keys()
        models = {n: {"held": self.held.get(n, 0), "inFlight": self.in_flight.get(n, 0)} for n in names}
        return (200 if path == REQUESTS_PATH else 404), json.dumps({"models": models})


@pytest.fixture
def gateway(shared_space: Namespace, operator: OperatorProcess) -> Iterator[Gateway]:
    """Yield the only pod with the gateway's labels."""
    container = {"name": "engine", "image": "x", "ports": [{"name": "http", "containerPort": PORT}]}
    pod = {
        "metadata": {"name": "gateway-0", "labels": {"app": "gateway"}},
        "spec": {"automountServiceAccountToken": False, "containers": [container]},
    }
    shared_space.create("pods", pod)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": GATEWAY_IP, "conditions": ready}
    shared_space.patch("pods", "gateway-0/status", {"status": status})
    found = Gateway()
    with page_server(found.answer, address=GATEWAY_IP, port=PORT):
        yield found
    shared_space.delete("pods", "gateway-0?gracePeriodSeconds=0")


@pytest.fixture
def idle_engine() -> Iterator[None]:
    with engines_at(ENGINE_IP, IDLE):
        yield


def asked(space: Namespace, name: str) -> int:
    return int((space.get("deployments", name) or {"spec": {"replicas": -1}})["spec"]["replicas"])


def test_held_request_starts_a_replica_and_idleness_removes_it(
    shared_space: Namespace, gateway: Gateway, idle_engine: None
) -> None:
    space = shared_space
    down = {"window": "3s", "period": "1s"}
    space.apply("sleepy", replicas=0, autoscaling={"minReplicas": 0, "maxReplicas": 2, "scaleDown": down})
    ready = space.wait_reason("sleepy", "Ready", "ScaledToZero")
    assert (ready["status"], "the next request starts a replica" in ready["message"]) == ("True", True)
    available = space.condition("sleepy", "Available")
    assert (available["status"], available["reason"]) == ("True", "HeldByGateway")
    assert space.pods("sleepy") == []

    gateway.held = {"sleepy": 1}
    until(lambda: asked(space, "sleepy") == 1)
    resource = space.get("llmdeployments", "sleepy")
    assert resource is not None
    decision = resource["status"]["autoscaling"]["lastDecision"]
    assert (decision["from"], decision["to"], decision["reason"]) == (0, 1, "HeldRequests")

    until(lambda: space.pods("sleepy"))
    space.run_pods("sleepy", address=ENGINE_IP)
    space.wait_reason("sleepy", "Ready", "Serving")
    gateway.held, gateway.in_flight = {}, {"sleepy": 1}
    quiet = time.monotonic() + 6
    until(lambda: asked(space, "sleepy") != 1 or time.monotonic() > quiet)
    assert asked(space, "sleepy") == 1, "not while one streams"

    gateway.in_flight = {}
    until(lambda: asked(space, "sleepy") == 0)
    space.wait_reason("sleepy", "Ready", "ScaledToZero")
