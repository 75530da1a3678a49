"""Parts of the cluster fail, return, have a wrong clock or lose history: nothing is lost or created twice.

It uses its own API server, because the whole cluster is affected. Cases of one operator run side by side. Each test
reports how long it took until everything was as specified; `pytest -s` shows the table, QUIRE_OUTAGE_SECONDS=60 makes
outages as long as real ones.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kube_support.disturbances import Account, compact
from kube_support.faults import Fault, FaultProxy
from kube_support.ledger import Flock, Ledger, Row, elsewhere
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from kube_support.replicas import BUSY, IDLE, engines_at
from kube_support.rights import grant
from kube_support.tcp import TcpProxy

from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.crds import wait_established

CRD = Path(__file__).parents[3] / "crds" / "llmdeployments.yaml"
OUTAGE_SECONDS = float(os.environ.get("QUIRE_OUTAGE_SECONDS", "12"))
SKEW_SECONDS = 600.0
QUIET_SECONDS = max(10.0, OUTAGE_SECONDS)
NAMES = ("a", "b", "c")
ENGINES = "127.0.77.3"
IMAGE = "registry.example/engine:1"


@pytest.fixture(scope="module")
def server(cluster_binaries: Binaries) -> Iterator[ControlPlane]:
    started = ControlPlane.temporary(cluster_binaries)
    try:
        started.start()
        install_crd(started)
        yield started
    finally:
        started.stop()


def install_crd(server: ControlPlane) -> None:
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    wait_established(server.client(), "llmdeployments.quire.dev")


def new_space(server: ControlPlane) -> Namespace:
    name = f"outage-{uuid.uuid4().hex[:8]}"
    answer = server.client().post("/api/v1/namespaces", {"metadata": {"name": name}})
    assert answer.ok, answer.body
    return Namespace(server, name)


@pytest.fixture(scope="module")
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    print(f"\noutages of {OUTAGE_SECONDS:g} s\n{ledger.table()}")


# --- outages of one operator ---


def lost_connections(server: ControlPlane, operators: Operators) -> Row:
    """All connections are lost silently: watches, the Lease's, those in the pool."""
    space = new_space(server)
    proxy = TcpProxy(server, space.kubeconfig)
    operator = operators.start(*space.flags(proxy.kubeconfig), identity=space.name)
    flock = Flock(space, NAMES)
    flock.make()
    flock.begin()
    cut = time.monotonic()
    assert proxy.lose_connections() >= 3
    flock.change()
    row = flock.measure("every connection lost without a word", since=cut)
    operator.kill()
    proxy.stop()
    return row


def cut_watches(server: ControlPlane, operators: Operators) -> Row:
    """Only the watches are cut off for good: the operator reports itself unhealthy until they return."""
    space = new_space(server)
    proxy = FaultProxy(server, space.kubeconfig)
    operator = operators.start(*space.flags(proxy.kubeconfig), identity=space.name)
    flock = Flock(space, NAMES)
    flock.make()
    assert operator.health() == (200, "ok")
    flock.begin()
    proxy.faults = [Fault("GET", "", times=10**6, user_agent="kopf")]
    proxy.cut_streams("kopf")
    until(lambda: operator.health()[0] == 503)
    assert "the watches have shown nothing of our Lease for" in operator.health()[1]
    assert space.holder() == operator.identity, "it leads: the kubelet has to end it"
    flock.change()
    proxy.faults = []
    proxy.cut_streams("kopf")
    mended = time.monotonic()
    row = flock.measure("watches alone cut off until /healthz said so", since=mended)
    until(lambda: operator.health() == (200, "ok"))
    operator.kill()
    proxy.stop()
    return row


def skewed_clocks(server: ControlPlane, operators: Operators) -> Row:
    """Run two operators whose clocks are ten minutes ahead and ten minutes behind."""
    space = new_space(server)
    fast = operators.start(
        *space.flags(), identity=f"{space.name}-1", clock_skew_seconds=SKEW_SECONDS, tick_seconds=1.0
    )
    flock = Flock(space, NAMES)
    flock.make()
    rules = {"window": "1s", "period": "1s", "maxStep": 8}
    bounds = {"minReplicas": 1, "maxReplicas": 3}
    space.apply("scaled", replicas=1, autoscaling=bounds | {"scaleDown": rules, "targets": {"queueDepth": 4}})
    space.wait_settled("scaled")
    with engines_at(ENGINES, BUSY):
        space.run_pods("scaled", address=ENGINES)
        until(lambda: asked(space, "scaled") == 3, why=fast.last_words)
    fast.kill()
    flock.begin()
    flock.change()
    killed = time.monotonic()
    slow = operators.start(
        *space.flags(), identity=f"{space.name}-2", clock_skew_seconds=-SKEW_SECONDS, tick_seconds=1.0
    )
    row = flock.measure("killed; the next one's clock is 20 min behind", since=killed)
    until(lambda: len(space.pods("scaled")) == 3)
    with engines_at(ENGINES, IDLE):
        space.run_pods("scaled", address=ENGINES)
        until(lambda: asked(space, "scaled") == 1, why=slow.last_words)
    slow.kill()
    return row


def asked(space: Namespace, name: str) -> int:
    deployment = space.get("deployments", name)
    return -1 if deployment is None else int(deployment["spec"]["replicas"])


def expired_token(server: ControlPlane, operators: Operators, folder: Path) -> Row:
    """In a pod, the token is rejected for a while before the file has another."""
    space = new_space(server)
    assert space.kubeconfig.exists()
    account = Account(space, folder / "account")
    account.renew()
    address = urlsplit(server.server.url)
    environment = {"KUBERNETES_SERVICE_HOST": str(address.hostname), "KUBERNETES_SERVICE_PORT": str(address.port)}
    operator = operators.start(
        *space.flags()[2:], identity=space.name, service_account=account.folder, environment=environment
    )
    flock = Flock(space, NAMES)
    flock.make()
    flock.begin()
    account.revoke()
    until(lambda: operator.said("our credentials were not accepted"))
    flock.change()
    time.sleep(3)
    account.renew()
    row = flock.measure("token revoked; then the file has a new one", since=time.monotonic())
    operator.kill()
    return row


Work = Callable[[ControlPlane, Operators], Row]
SIDE_BY_SIDE: dict[str, Work] = {
    "lost connections": lost_connections,
    "cut watches": cut_watches,
    "skewed clocks": skewed_clocks,
}


@pytest.fixture(scope="module")
def side_by_side(
    server: ControlPlane, operators: Operators, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Row]]:
    begun = {name: elsewhere(lambda work=work: work(server, operators)) for name, work in SIDE_BY_SIDE.items()}
    folder = tmp_path_factory.mktemp("account")
    return begun | {"expired token": elsewhere(lambda: expired_token(server, operators, folder))}


@pytest.mark.parametrize("name", [*SIDE_BY_SIDE, "expired token"])
def test_faults_of_one_operator_cause_no_duplicate_objects(
    name: str, side_by_side: dict[str, Callable[[], Row]], ledger: Ledger
) -> None:
    row = ledger.add(side_by_side[name]())
    assert row.duplicates == 0, row
    assert row.writes <= 30 * len(NAMES), row


# --- outages of the whole cluster ---


@pytest.fixture(scope="module")
def quiet(server: ControlPlane, side_by_side: dict[str, Callable[[], Row]]) -> ControlPlane:
    """Return the API server after the cases side by side have ended."""
    for wait in side_by_side.values():
        try:
            wait()
        except Exception:
            continue  # its own test reports it
    return server


@pytest.fixture(scope="module")
def everywhere(quiet: ControlPlane, operators: Operators) -> Iterator[OperatorProcess]:
    """Yield one operator of the whole cluster, with the chart's permissions for that.

    Its autoscaler ticks each second: it writes the measured start-up time a tick after replicas are ready, which with
    the default of 15 s could be long after everything else is quiet.
    """
    home = new_space(quiet)
    kubeconfig = grant(quiet, home.name, everywhere=True)
    flags = ("--kubeconfig", str(kubeconfig), "--namespace", home.name)
    operator = operators.start(*flags, identity=home.name, tick_seconds=1.0)
    home.wait_holder(operator.identity)
    yield operator
    operator.kill()


def test_a_quiet_minute_has_no_write_but_the_lease(quiet: ControlPlane, everywhere: OperatorProcess) -> None:
    """Twelve LLMDeployments, a third of them autoscaled, whose metrics require nothing."""
    space = new_space(quiet)
    steady = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
    names = [f"quiet-{number}" for number in range(12)]
    with engines_at(ENGINES, IDLE):
        for number, name in enumerate(names):
            space.apply(name, replicas=1, **(steady if number % 3 == 0 else {}))
        for name in names:
            until(lambda name=name: space.run_pods(name, address=ENGINES))
        for name in names:
            space.wait_reason(name, "Ready", "Serving")
        until(lambda: not written(space, everywhere, seconds=3))
        start = space.server.audit.position()
        found = written(space, everywhere, seconds=QUIET_SECONDS)
    requests = space.server.audit.requests(start, user_agent=everywhere.identity)
    assert any(request.resource == "leases" for request in requests), "it is alive and leading"
    assert found == []
    assert space.condition("quiet-0", "Autoscaling")["reason"] == "Enforcing"


def written(space: Namespace, operator: OperatorProcess, *, seconds: float) -> list[str]:
    """Return the operator's writes in the next seconds, in the whole cluster."""
    start = space.server.audit.position()
    time.sleep(seconds)
    asked = space.server.audit.requests(start, user_agent=operator.identity)
    return [str(request) for request in asked if request.is_mutating and request.resource != "leases"]


@pytest.fixture
def flock(quiet: ControlPlane, everywhere: OperatorProcess) -> Iterator[Flock]:
    flock = Flock(new_space(quiet), NAMES)
    flock.make()
    flock.begin()
    yield flock
    assert everywhere.is_alive
    for name in flock.names:
        quiet.client().delete(flock.space.path("llmdeployments", name))


def test_operator_recovers_from_a_killed_api_server(flock: Flock, quiet: ControlPlane, ledger: Ledger) -> None:
    quiet.api_server.kill()
    time.sleep(OUTAGE_SECONDS)
    quiet.api_server.start()
    quiet.wait_for_api_server()
    back = time.monotonic()
    flock.change()
    row = ledger.add(flock.measure("API server killed and started again", since=back))
    assert row.duplicates == 0 and row.writes <= 30, row


def test_operator_recovers_from_a_killed_and_compacted_etcd(
    flock: Flock, quiet: ControlPlane, everywhere: OperatorProcess, ledger: Ledger
) -> None:
    """Changes while the operator is stopped are compacted away before it continues: its watches get 410 Gone."""
    everywhere.pause()
    flock.change()
    quiet.etcd.kill()
    quiet.etcd.start()
    until(lambda: flock.space.get("llmdeployments", NAMES[0]) is not None)
    compact(quiet)
    quiet.restart_api_server()
    back = time.monotonic()
    everywhere.resume()
    row = ledger.add(flock.measure("etcd killed, compacted; API server restarted", since=back))
    assert row.duplicates == 0 and row.writes <= 30, row


def test_operator_recovers_when_the_crd_is_restored(
    flock: Flock, quiet: ControlPlane, everywhere: OperatorProcess, ledger: Ledger
) -> None:
    quiet.kubectl("delete", "crd", "llmdeployments.quire.dev", "--timeout=60s")
    until(lambda: everywhere.said("there is no LLMDeployment kind in this cluster yet"))
    assert everywhere.health() == (200, "ok"), "nothing is wrong with it"
    install_crd(quiet)
    back = time.monotonic()
    for name in flock.names:
        flock.space.apply(name, replicas=1)
    # The garbage collector deletes the children of deleted LLMDeployments; each is created once more after that.
    until(lambda: all(owned(flock.space, name) for name in flock.names))
    took = time.monotonic() - back
    flock.begin()
    now = time.monotonic()
    flock.change()
    row = flock.measure("CRD removed and back, LLMDeployments applied again", since=now)
    ledger.add(row)
    assert row.duplicates == 0 and row.writes <= 30, row
    print(f"children of the new ones, once the old ones were collected: {took:.1f} s")


def owned(space: Namespace, name: str) -> bool:
    """Return True if all its children belong to the current LLMDeployment.

    The garbage collector deletes those of the previous one kind by kind, in its own order.
    """
    resource = space.get("llmdeployments", name)
    if resource is None:
        return False
    uid = resource["metadata"]["uid"]
    for kind in ("serviceaccounts", "services", "poddisruptionbudgets", "deployments"):
        children = [
            child["metadata"]
            for child in space.items(kind)
            if child["metadata"].get("labels", {}).get("quire.dev/llmdeployment") == name
        ]
        if not children or any("deletionTimestamp" in child for child in children):
            return False
        if any(child["ownerReferences"][0]["uid"] != uid for child in children):
            return False
    return True
