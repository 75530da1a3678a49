"""Configurations of the servers next to the nodes: Prometheus and its targets, DNS, the registry, the sandbox image."""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from quire_cluster import components, dns, pod_discovery, prometheus, registry
from quire_cluster.certificates import Authority
from quire_cluster.components import Ports, Site
from quire_cluster.debian import debian_programs
from quire_cluster.errors import ClusterError
from quire_cluster.nodes import pause

SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics"}


def pod(
    name: str = "a", *, annotations: dict[str, str] = SCRAPED, phase: str = "Running", ip: str | None = "10.77.1.2"
) -> dict[str, Any]:
    status = {"phase": phase} | ({} if ip is None else {"podIP": ip})
    metadata = {"name": name, "namespace": "chat", "uid": f"uid-{name}", "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}


def test_an_annotated_pod_is_scraped_under_its_name() -> None:
    (target,) = prometheus.targets([pod()])
    assert target == {
        "targets": ["10.77.1.2:8000"],
        "labels": {
            "__scheme__": "http",
            "__metrics_path__": "/metrics",
            "namespace": "chat",
            "pod": "a",
            "node": "node-1",
        },
    }


@pytest.mark.parametrize(
    "other",
    [
        pod(annotations={}),
        pod(annotations=SCRAPED | {"prometheus.io/scrape": "false"}),
        pod(annotations={"prometheus.io/scrape": "true"}),
        pod(phase="Pending"),
        pod(phase="Failed"),
        pod(ip=None),
    ],
    ids=["not annotated", "declined", "no port", "pending", "failed", "no address"],
)
def test_any_other_pod_is_not_scraped(other: dict[str, Any]) -> None:
    assert prometheus.targets([other]) == []


def test_a_pod_chooses_scheme_and_path() -> None:
    annotations = SCRAPED | {"prometheus.io/scheme": "https", "prometheus.io/path": "/figures"}
    (target,) = prometheus.targets([pod(annotations=annotations)])
    assert (target["labels"]["__scheme__"], target["labels"]["__metrics_path__"]) == ("https", "/figures")


def test_pods_are_added_and_removed_by_a_watch(tmp_path: Path) -> None:
    pods: pod_discovery.Pods = {}
    file = tmp_path / "pods.json"

    def written(kind: str, changed: dict[str, Any]) -> list[str]:
        pod_discovery.apply(pods, {"type": kind, "object": changed})
        pod_discovery.write(file, pods)
        return [target["labels"]["pod"] for target in json.loads(file.read_text())]

    assert written("ADDED", pod("b", ip=None)) == []
    assert written("MODIFIED", pod("b")) == ["b"]
    assert written("ADDED", pod("a")) == ["a", "b"]
    assert written("DELETED", pod("b")) == ["a"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_would_not_change_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "pods.json"
    pod_discovery.write(file, {"uid-a": pod()})
    before = file.stat().st_ino
    pod_discovery.write(file, {"uid-a": pod()})
    assert file.stat().st_ino == before


def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    try:
        promtool = debian_programs("prometheus", ("prometheus", "promtool"))["promtool"]
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    targets, config = tmp_path / "targets.json", tmp_path / "prometheus.json"
    pod_discovery.write(targets, {"uid-a": pod()})
    config.write_text(prometheus.config(targets))
    checked = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_names_outside_the_cluster_do_not_exist() -> None:
    cluster, rest = dns.config(Path("/state/observer.kubeconfig")).split("\n\n")
    assert cluster.startswith("cluster.local:53 {")
    assert "kubernetes cluster.local" in cluster
    assert rest.startswith(".:53 {")
    assert "rcode NXDOMAIN" in rest
    assert "forward" not in cluster + rest


@pytest.mark.parametrize(("most", "is_kept"), [(10, True), (9, False)])
def test_registry_storage_is_emptied_when_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, is_kept: bool
) -> None:
    blob = tmp_path / "storage" / "docker" / "registry" / "v2" / "blobs" / "sha256" / "ab" / "abcd" / "data"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"0123456789")
    monkeypatch.setattr(registry, "MOST_BYTES_KEPT", most)
    registry.make_storage(tmp_path / "storage")
    assert (tmp_path / "storage").is_dir() and blob.exists() is is_kept


def test_registry_storage_is_created(tmp_path: Path) -> None:
    registry.make_storage(tmp_path / "cache" / "registry")
    assert (tmp_path / "cache" / "registry").is_dir()


def test_the_registry_listens_on_the_bridge_alone() -> None:
    document = json.loads(registry.config(Path("/cache/registry")))
    assert document["http"]["addr"] == "10.77.0.1:5000"
    assert document["storage"]["filesystem"]["rootdirectory"] == "/cache/registry"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "pause"
    path.write_bytes(b"a program")
    return path


def test_the_sandbox_image_is_whole(program: Path) -> None:
    """Every digest in it refers to existing content, from the index to the program."""
    archive = _files(pause.archive(program, architecture="amd64"))
    (named,) = json.loads(archive["index.json"])["manifests"]
    assert named["annotations"]["io.containerd.image.name"] == pause.image_name(program)
    manifest = json.loads(_blob(archive, named))
    config = json.loads(_blob(archive, manifest["config"]))
    (layer,) = (_blob(archive, layer) for layer in manifest["layers"])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert config["config"]["Entrypoint"] == ["/pause"]
    assert _files(layer) == {"pause": b"a program"}


def test_the_sandbox_image_is_named_by_what_is_in_it(program: Path) -> None:
    before = pause.image_name(program), pause.archive(program, architecture="amd64")
    assert (pause.image_name(program), pause.archive(program, architecture="amd64")) == before
    program.write_bytes(b"another program")
    assert pause.image_name(program) != before[0]


def _files(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {name: file.read() for name in opened.getnames() if (file := opened.extractfile(name)) is not None}


def _blob(archive: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    algorithm, _, digest = descriptor["digest"].partition(":")
    blob = archive[f"blobs/{algorithm}/{digest}"]
    assert (hashlib.sha256(blob).hexdigest(), len(blob)) == (digest, descriptor["size"])
    return blob


PORTS = Ports(api_server=6443, etcd=1, etcd_peer=2)


def _api_server(site: Site) -> list[str]:
    return components.api_server(Path("/s"), PORTS, {"kube-apiserver": Path("/k")}, Authority(Path("/s/pki")), site)


def test_a_control_plane_without_nodes_stays_on_loopback() -> None:
    command = _api_server(Site())
    assert {"--bind-address=127.0.0.1", "--authorization-mode=RBAC"} <= set(command)
    assert not [flag for flag in command if "kubelet" in flag]


def test_nodes_reach_the_control_plane_and_only_their_objects() -> None:
    site = Site(address="10.77.0.1", has_nodes=True)
    command = _api_server(site)
    assert {
        "--bind-address=10.77.0.1",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--kubelet-preferred-address-types=InternalIP",
    } <= set(command)
    assert "--endpoint-reconciler-type=none" not in command
    assert {"IP:127.0.0.1", "IP:10.77.0.1", "IP:10.96.0.1"} <= set(site.certificate_names.split(","))
