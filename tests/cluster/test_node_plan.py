"""Plans of nodes: names, addresses, links, and configurations of their programs."""

import itertools
import json
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from quire_cluster.certificates import KeyPair
from quire_cluster.nodes import containerd, kubelet, namespaces, network, proxy
from quire_cluster.nodes.kubelet import KubeletFiles
from quire_cluster.nodes.plan import HOST_ADDRESS, NODE_SUBNET, NODES, REGISTRY, SUBNETS, NodePlan
from quire_cluster.programs import Programs

FIRST, SECOND = NODES
LINK_NAME_MAX = 15  # the kernel's IFNAMSIZ, less its final zero
FILES = KubeletFiles(
    authority=Path("/state/ca.crt"),
    serving=KeyPair(certificate=Path("/state/node-1.crt"), key=Path("/state/node-1.key")),
    resolv_conf=Path("/state/node-1/resolv.conf"),
)
PROGRAMS = Programs(built={}, packaged={"runc": Path("/cache/runc/usr/sbin/runc")}, network_plugins=Path("/cache/cni"))


def test_subnets_do_not_overlap() -> None:
    for one, other in itertools.combinations(map(ip_network, SUBNETS), 2):
        assert not one.overlaps(other)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_a_node_is_on_the_bridge_and_its_names_are_short_enough(node: NodePlan) -> None:
    assert ip_address(node.address) in ip_network(NODE_SUBNET)
    assert ip_address(HOST_ADDRESS) in ip_network(NODE_SUBNET)
    assert ip_address(node.pod_gateway) in ip_network(node.pod_subnet)
    assert len(node.link) <= LINK_NAME_MAX


def test_nodes_share_nothing() -> None:
    for name in ("name", "address", "pod_subnet", "network_namespace", "mount_namespace_file", "link", "cgroup"):
        assert getattr(FIRST, name) != getattr(SECOND, name), name


def test_a_node_has_routes_only_to_services_and_pods() -> None:
    commands = network.node_commands(FIRST, [SECOND])
    routes = [command[-3:] for command in commands if "route" in command]
    assert routes == [["10.96.0.0/16", "via", "10.77.0.1"], ["10.77.2.0/24", "via", "10.77.0.12"]]


def test_the_host_reaches_pods_and_services_through_nodes() -> None:
    assert [command[3:] for command in network.host_routes(NODES)] == [
        ["10.77.1.0/24", "via", "10.77.0.11"],
        ["10.77.2.0/24", "via", "10.77.0.12"],
        ["10.96.0.0/16", "via", "10.77.0.11"],
    ]


def test_only_a_nodes_own_namespace_forwards_and_filters() -> None:
    commands = [*network.bridge_commands(), *network.host_routes(NODES), *network.node_commands(FIRST, [SECOND])]
    writing = [command for command in commands if "/proc/sys" in " ".join(command)]
    assert [command[:2] for command in writing] == [["nsenter", "--net=/run/netns/quire-node-1"]]
    assert not [command for command in commands if "iptables" in command]


def test_every_command_can_be_repeated() -> None:
    """`add` would fail for existing objects; `replace` and `set` do not."""
    commands = [*network.bridge_commands(), *network.host_routes(NODES), *network.node_commands(FIRST, [SECOND])]
    assert not [command for command in commands if "add" in command]


def test_a_node_has_its_own_folders_at_fixed_paths() -> None:
    script = namespaces.setup_script(Path("/state/node-1"))
    assert "mount --bind /state/node-1/kubelet /var/lib/kubelet" in script
    assert script.index("make-rshared") < script.index("--bind") < script.index("tmpfs /run")


def test_containerd_keeps_only_images_in_the_cache() -> None:
    text = containerd.config(
        folder=Path("/state/node-1"), store=Path("/cache/node-1"), programs=PROGRAMS, pause_image="pause:1"
    )
    document = tomllib.loads(text)
    cri = document["plugins"]["io.containerd.grpc.v1.cri"]
    assert (document["root"], document["state"]) == ("/cache/node-1", "/run/containerd")
    assert document["grpc"]["address"] == containerd.SOCKET
    assert cri["sandbox_image"] == "pause:1"
    assert cri["containerd"]["discard_unpacked_layers"]
    assert cri["containerd"]["runtimes"]["runc"]["options"] == {
        "BinaryName": "/cache/runc/usr/sbin/runc",
        "SystemdCgroup": False,
    }
    assert cri["cni"] == {"bin_dir": "/cache/cni", "conf_dir": "/state/node-1/cni.d"}


def test_the_registry_is_reached_without_tls() -> None:
    hosts = tomllib.loads(containerd.registry_config())
    assert hosts["server"] == f"http://{REGISTRY}"
    assert hosts["host"][f"http://{REGISTRY}"]["capabilities"] == ["pull", "resolve"]


def test_pods_have_addresses_of_their_node_without_nat() -> None:
    bridge, _ = json.loads(containerd.network_config(SECOND))["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.77.2.0/24", "gateway": "10.77.2.1"}]]
    assert "ipMasq" not in bridge


def test_configurations_are_rewritten_only_if_changed(tmp_path: Path) -> None:
    def write(node: NodePlan) -> Path:
        return containerd.write(node, folder=tmp_path, store=tmp_path, programs=PROGRAMS, pause_image="pause:1")

    write(FIRST)
    network_file = tmp_path / "cni.d" / "10-quire.conflist"
    network_file.chmod(0o400)
    before = network_file.stat().st_mtime_ns
    write(FIRST)
    assert network_file.stat().st_mtime_ns == before
    write(SECOND)
    assert "10.77.2.0/24" in network_file.read_text()


def test_each_kubelet_has_its_own_cgroup_and_certificate() -> None:
    document = json.loads(kubelet.config(FIRST, FILES))
    assert document["cgroupRoot"] == "/quire/node-1"
    assert document["address"] == "10.77.0.11"
    assert document["clusterDNS"] == [HOST_ADDRESS]
    assert document["tlsCertFile"] == "/state/node-1.crt"
    assert document["failCgroupV1"] is False
    assert kubelet.subject(FIRST) == "/O=system:nodes/CN=system:node:node-1"


def test_a_kubelet_does_not_evict_or_collect_images() -> None:
    document = json.loads(kubelet.config(FIRST, FILES))
    assert document["evictionHard"]["nodefs.available"] == "1%"
    assert document["imageGCHighThresholdPercent"] == 100


def test_kube_proxy_masquerades_for_all_but_pods_of_its_node() -> None:
    command = proxy.command(Path("/kube-proxy"), SECOND, Path("/kubeconfig"))
    assert "--cluster-cidr=10.77.2.0/24" in command
    assert "--hostname-override=node-2" in command
