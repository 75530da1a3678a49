"""A thousand LLMDeployments of three replicas on a real API server with kwok nodes: the operator against a bare loop.

The bare loop applies the same children with the same client, as many at once as the operator, and reads nothing. Each
run has its own control plane; the two alternate. For the operator, the report also includes the cost of a quiet minute
and a restart with all objects present.

    PYTHONPATH=tests/cluster python -m benchmarks.operator.scale --count 1000 --runs 1 --json out/scale.json
"""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, cpu_seconds, interrupt_on_terminate, write_json
from quire_cluster.audit import Position
from quire_cluster.binaries import ensure
from quire_cluster.client import ApiClient
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.fake_nodes import PROGRAMS as NODE_PROGRAMS
from quire_cluster.fake_nodes import FakeNodes
from quire_cluster.ports import free_ports
from quire_cluster.progress import Progress
from quire_operator.api import Spec
from quire_operator.deployment.desired import desired
from quire_operator.deployment.manifests import Manifests
from quire_operator.deployment.pod_template import Images
from quire_operator.kube.client import KubeClient
from quire_operator.kube.connection import Connection, load_configuration
from quire_operator.kube.errors import Throttled, Unavailable
from quire_operator.kube.objects import Key

IMAGES = Images(engine="quire-engine:scale")
WORKERS = 32
IDENTITY = "scale-operator"
RETRY_SECONDS = 0.5


CRD = ROOT / "crds" / "llmdeployments.yaml"
NAMESPACE = "scale"
REPLICAS, NODES = 3, 5
LIMIT_SECONDS = 1800.0

Row = dict[str, Any]


class Cluster:
    """A control plane with fake nodes and LLMDeployments that no operator has reconciled yet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.plane = ControlPlane.temporary(ensure((*PROGRAMS, *NODE_PROGRAMS), Progress(sys.stderr)))
        self.plane.start()
        self.plane.kubectl("apply", "--server-side", "-f", str(CRD))
        self.plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRD))
        self.nodes = FakeNodes(self.plane)
        self.nodes.start(NODES)
        self.client: ApiClient = self.plane.client()
        self.client.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for number in range(count):
            answer = self.client.post(f"/apis/quire.dev/v1alpha1/namespaces/{NAMESPACE}/llmdeployments", body(number))
            assert answer.ok, answer.body

    def there(self, group: str, plural: str) -> int:
        """Return the number of objects of a kind: list one and let the server count the rest."""
        answer = self.client.get(f"/{group}/namespaces/{NAMESPACE}/{plural}?limit=1").body
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)

    def applied(self) -> bool:
        return (
            self.there("apis/apps/v1", "deployments") >= self.count
            and self.there("api/v1", "services") >= 2 * self.count
        )

    def serving(self) -> bool:
        """Return whether every Deployment has its replicas ready."""
        deployments = self.client.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments").body["items"]
        ready = sum(item["status"].get("readyReplicas", 0) for item in deployments)
        return bool(ready == REPLICAS * self.count)

    def told(self) -> bool:
        """Return whether every LLMDeployment reports that in its status."""
        resources = self.client.get(f"/apis/quire.dev/v1alpha1/namespaces/{NAMESPACE}/llmdeployments").body["items"]
        return sum(item.get("status", {}).get("readyReplicas", 0) for item in resources) == REPLICAS * self.count

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the cluster has used."""
        processes = (*self.plane.processes, self.nodes.scheduler, self.nodes.kwok)
        return sum(cpu_seconds(process.pid) for process in processes if process.pid is not None)

    def children(self) -> dict[str, int]:
        """Return the objects per kind that belong to LLMDeployments."""
        kinds = {
            "Deployment": ("apis/apps/v1", "deployments"),
            "Service": ("api/v1", "services"),
            "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
            "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
            "Pod": ("api/v1", "pods"),
        }
        return {kind: self.there(*where) for kind, where in kinds.items()}


def body(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": f"model-{number:04}", "namespace": NAMESPACE},
        "spec": {"model": {"source": "file:///models/demo"}, "replicas": REPLICAS},
    }


def wait(look: Callable[[], bool], what: str, started: float, *, every: float = 1.0) -> float:
    """Return the seconds from ``started`` until ``look`` is true."""
    while not look():
        if time.monotonic() - started > LIMIT_SECONDS:
            sys.exit(f"not after {LIMIT_SECONDS:g} s: {what}")
        time.sleep(every)
    took = time.monotonic() - started
    print(f"  {what}: {took:.0f} s", file=sys.stderr)
    return took


# --- the bare loop ---


def bare_run(count: int) -> Row:
    """Measure a process that only applies the same children."""
    cluster = Cluster(count)
    try:
        started, burnt = time.monotonic(), cluster.cpu_seconds()
        loop = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.operator.scale", "--bare", str(cluster.plane.admin_kubeconfig)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        applied = wait(lambda: loop.poll() is not None, "bare loop: applied", started, every=0.2)
        assert loop.returncode == 0 and cluster.applied()
        own = float(loop.communicate()[0])
        serving = wait(cluster.serving, "bare loop: all replicas ready", started, every=3.0)
        return {
            "applied_seconds": applied,
            "serving_seconds": serving,
            "cluster_cpu_seconds": cluster.cpu_seconds() - burnt,
            "cpu_seconds": own,
            "children": cluster.children(),
        }
    finally:
        cluster.plane.stop()


async def apply_all(kubeconfig: str) -> None:
    """Apply every child of all LLMDeployments, ``WORKERS`` LLMDeployments at a time."""
    connection = Connection(await load_configuration(kubeconfig), user="bare-loop")
    cluster = KubeClient(connection, namespaces=(NAMESPACE,))
    work = [(resource.key, manifests(resource.body, resource.uid)) async for resource in cluster.list_resources()]

    async def worker() -> None:
        while work:
            key, children = work.pop()
            await apply(cluster, key, children)

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(worker())
    await connection.close()


async def apply(cluster: KubeClient, key: Key, children: Manifests) -> None:
    for manifest in children:
        while True:
            try:
                await cluster.create(key, manifest, must_be_new=False)
                break
            except (Throttled, Unavailable):
                await asyncio.sleep(RETRY_SECONDS)


def manifests(resource: Any, uid: str) -> Manifests:
    spec = Spec.parse(resource)
    assert isinstance(spec, Spec)
    made = desired(spec, REPLICAS, uid=uid, images=IMAGES)
    assert isinstance(made, Manifests)
    return made


# --- the operator ---


class Operator:
    """An operator in its own process."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        (self.port,) = free_ports(1)
        flags = {
            "--kubeconfig": cluster.plane.admin_kubeconfig,
            "--namespace": NAMESPACE,
            "--watch-namespace": NAMESPACE,
            "--identity": IDENTITY,
            "--workers": WORKERS,
            "--engine-image": IMAGES.engine,
            "--host": "127.0.0.1",
            "--port": self.port,
        }
        command = [sys.executable, "-m", "quire_operator"] + [str(word) for pair in flags.items() for word in pair]
        self._log = log.open("a")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    def is_idle(self) -> bool:
        """Return whether it leads and no reconcile waits."""
        try:
            values = dict(re.findall(r"^(quire_operator_(?:leading|queue_depth)) (\S+)$", self.metrics(), re.MULTILINE))
        except OSError:
            return False
        return values == {"quire_operator_leading": "1.0", "quire_operator_queue_depth": "0.0"}

    def writes(self) -> dict[str, int]:
        """Its successful mutating requests, by its own count: an audit log of this length is rotated away."""
        pattern = r'^quire_operator_writes_total\{kind="(\w+)",verb="([\w-]+)"\} (\S+)$'
        found = re.findall(pattern, self.metrics(), re.MULTILINE)
        return {f"{verb} {kind}": int(float(count)) for kind, verb, count in found}

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def megabytes(self, field: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024


def operator_run(count: int, folder: Path, *, quiet_seconds: float) -> Row:
    """Measure the operator from nothing to all replicas ready, in a quiet minute, and in a restart."""
    cluster = Cluster(count)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "operator.log"
    with ExitStack() as stack:
        stack.callback(cluster.plane.stop)
        started, burnt = time.monotonic(), cluster.cpu_seconds()
        operator = Operator(cluster, log)
        stack.callback(operator.stop)
        row: Row = {"applied_seconds": wait(cluster.applied, "operator: applied", started)}
        row["serving_seconds"] = wait(cluster.serving, "operator: all replicas ready", started, every=3.0)
        row["told_seconds"] = wait(cluster.told, "operator: every status says so", started, every=3.0)
        row["children"] = cluster.children()
        row["writes"] = operator.writes()
        wait(operator.is_idle, "operator: idle", started)
        row["cpu_seconds"], row["cluster_cpu_seconds"] = operator.cpu_seconds(), cluster.cpu_seconds() - burnt
        row |= quiet(cluster, operator, quiet_seconds)
        row["megabytes"], row["peak_megabytes"] = operator.megabytes("VmRSS"), operator.megabytes("VmHWM")
        row |= restarted(cluster, operator, log)
        return row


def quiet(cluster: Cluster, operator: Operator, seconds: float) -> Row:
    """Measure the operator's writes and CPU time while nothing happens."""
    time.sleep(15.0)  # kopf restarts its watches regularly; the events of the last ready pods are over
    since, burnt, started = cluster.plane.audit.position(), operator.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    share = (operator.cpu_seconds() - burnt) / (time.monotonic() - started)
    return {"quiet_seconds": seconds, "quiet_cpu_percent": 100 * share, "quiet_writes": writes(cluster, since)}


def restarted(cluster: Cluster, operator: Operator, log: Path) -> Row:
    """Stop the operator with SIGTERM, start it again, and wait until it has reconciled everything."""
    before = generations(cluster)
    operator.stop()
    started = time.monotonic()
    fresh = Operator(cluster, log)
    try:
        wait(fresh.is_idle, "operator: leads again", started, every=0.5)
        looked_at = wait(lambda: fresh.is_idle() and passes(fresh) >= cluster.count, "operator: all seen", started)
        return {
            "restart_seconds": looked_at,
            "restart_writes": fresh.writes(),
            "restart_changed": sum(before[name] != version for name, version in generations(cluster).items()),
            "restart_megabytes": fresh.megabytes("VmRSS"),
        }
    finally:
        fresh.stop()


def passes(operator: Operator) -> float:
    return float(re.findall(r"^quire_operator_reconcile_seconds_count (\S+)$", operator.metrics(), re.MULTILINE)[0])


def generations(cluster: Cluster) -> dict[str, int]:
    deployments = cluster.client.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments").body["items"]
    return {item["metadata"]["name"]: item["metadata"]["generation"] for item in deployments}


def writes(cluster: Cluster, since: Position) -> dict[str, int]:
    """Return the mutating requests of the operator except its Lease's, by verb and resource."""
    made = cluster.plane.audit.mutating_requests(since, user_agent=IDENTITY, besides=frozenset({"leases"}))
    counted: dict[str, int] = {}
    for request in made:
        name = f"{request.verb} {request.resource}"
        counted[name] = counted.get(name, 0) + 1
    return counted


def summary(bare: Sequence[Row], operator: Sequence[Row]) -> list[tuple[str, str]]:
    def median(rows: Sequence[Row], name: str) -> float:
        return statistics.median(row[name] for row in rows)

    lines = []
    for name, what in (("applied_seconds", "all children applied"), ("serving_seconds", "all replicas ready")):
        ours, loops = median(operator, name), median(bare, name)
        lines.append((what, f"{ours:.0f} s; bare loop {loops:.0f} s; ratio {ours / loops:.2f}"))
    last = operator[-1]
    ours, loops = (median(rows, "cpu_seconds") + median(rows, "cluster_cpu_seconds") for rows in (operator, bare))
    processor_time = (
        f"{ours:.0f} s, {median(operator, 'cpu_seconds'):.0f} of them the operator's; bare loop {loops:.0f} s,"
        f" {median(bare, 'cpu_seconds'):.0f} its own; ratio {ours / loops:.2f}"
    )
    lines += [
        ("children", ", ".join(f"{count} {kind}" for kind, count in last["children"].items())),
        ("every status says so", f"{median(operator, 'told_seconds'):.0f} s"),
        ("writes until then", f"{sum(last['writes'].values())}: {last['writes']}"),
        ("processor time until then", processor_time),
        ("memory", f"{median(operator, 'megabytes'):.0f} MB resident, {median(operator, 'peak_megabytes'):.0f} peak"),
        (
            "quiet minute",
            f"{last['quiet_writes'] or 'no'} writes, {median(operator, 'quiet_cpu_percent'):.1f} % of a core",
        ),
        ("restart", f"{median(operator, 'restart_seconds'):.0f} s, {last['restart_changed']} Deployments changed"),
        ("writes of the restart", str(last["restart_writes"] or "none")),
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="LLMDeployments (default 1000)")
    parser.add_argument("--runs", type=int, default=1, help="interleaved runs of each (default 1)")
    parser.add_argument("--quiet", type=float, default=60.0, metavar="SECONDS", help="how long nothing happens")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--logs", type=Path, default=Path("out/operator-scale"), help="where the operator's log goes")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        asyncio.run(apply_all(options.bare))
        print(cpu_seconds(os.getpid()))
        return
    interrupt_on_terminate()  # which ends the control plane and the operator
    bare, operator = [], []
    for _ in range(options.runs):
        bare.append(bare_run(options.count))
        operator.append(operator_run(options.count, options.logs, quiet_seconds=options.quiet))
    for name, value in summary(bare, operator):
        print(f"{name:28} {value}")
    if options.json is not None:
        write_json(options.json, {"count": options.count, "bare": bare, "operator": operator})


if __name__ == "__main__":
    main()
