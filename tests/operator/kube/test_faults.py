"""An API server that rejects, fails, hangs or cuts connections: nothing is lost or created twice."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from kube_support.faults import Fault, FaultProxy
from kube_support.operators import Namespace, OperatorProcess, Operators

from quire_cluster.control_plane import ControlPlane


@pytest.fixture
def proxy(crd_installed: ControlPlane, space: Namespace) -> Iterator[FaultProxy]:
    started = FaultProxy(crd_installed, space.kubeconfig)
    yield started
    started.stop()


@pytest.fixture
def behind(proxy: FaultProxy, space: Namespace, operators: Operators) -> Iterator[OperatorProcess]:
    """Yield an operator that reaches the API server only through the proxy."""
    operator = operators.start(*space.flags(proxy.kubeconfig), identity=space.name)
    space.wait_holder(operator.identity)
    yield operator
    operator.kill()


def deployment(name: str) -> str:
    return f"/deployments/{name}$"


FAULTS = {
    "conflicting": Fault("PATCH", deployment("conflicting"), times=3, status=409),
    "throttled": Fault("PATCH", deployment("throttled"), times=1, status=429, headers={"Retry-After": "2"}),
    "failing": Fault("PATCH", deployment("failing"), times=3, status=500),
    "gatewayless": Fault("PATCH", deployment("gatewayless"), times=2, status=503),
    "hanging": Fault("PATCH", deployment("hanging"), times=2),
    "cut": Fault("PATCH", deployment("cut"), times=1, cut=True),
    "unlucky": Fault("PATCH", "/llmdeployments/unlucky/status$", times=3, status=409),
    "unread": Fault("GET", "/services/unread$", times=2, status=500),
}
# Only a pass after a failed one reads what no watch shows.
BEFORE_READS = (Fault("PATCH", "/services/unread$", times=1, status=500),)
WITHOUT = "untroubled"


def test_temporary_faults_are_retried_without_delaying_others(
    behind: OperatorProcess, proxy: FaultProxy, space: Namespace
) -> None:
    proxy.faults = [*FAULTS.values(), *BEFORE_READS]
    start = space.server.audit.position()
    for name in (*FAULTS, WITHOUT):
        space.apply(name)
    for name in (*FAULTS, WITHOUT):
        space.wait_settled(name)
    assert all(fault.times == 0 for fault in FAULTS.values())
    made_at = {item["metadata"]["name"]: item["metadata"]["creationTimestamp"] for item in space.items("deployments")}
    assert made_at[WITHOUT] < made_at["hanging"], "it came last, and was not held up by the requests that hang"

    written = space.server.audit.mutating_requests(start, user_agent=behind.identity)
    made = Counter(r.name for r in written if r.resource == "deployments" and r.status == 201)
    assert made == Counter((*FAULTS, WITHOUT)), "also the one that was made but whose answer was cut off is made once"
    throttled = [at for at, _, path in proxy.seen if path.endswith("/deployments/throttled")]
    assert throttled[1] - throttled[0] >= 2.0, "Retry-After is obeyed"
    failing = [at for at, _, path in proxy.seen if path.endswith("/deployments/failing")]
    waits = [after - before for before, after in itertools.pairwise(failing)][:3]
    assert all(wait >= 0.75 * doubled for wait, doubled in zip(waits, (0.5, 1.0, 2.0), strict=True)), waits
