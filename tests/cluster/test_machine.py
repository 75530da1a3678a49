"""Requirements on a machine with nodes, and restoration of the host."""

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.errors import MachineUnfit
from quire_cluster.nodes import cgroups, machine, requirements
from quire_cluster.nodes.requirements import Seen, foreign_networks, problems

FIT = Seen(
    system="Linux",
    is_root=True,
    missing_programs=(),
    has_overlay=True,
    has_bridge_filter=True,
    free_bytes=50 * 2**30,
    has_images=False,
    store=Path("/home/user/.cache/quire/nodes"),
    state=Path("/home/user/.local/state/quire/cluster"),
    foreign_networks=("127.0.0.1/8", "192.0.2.2/24", "172.17.0.0/16"),
)


def test_suitable_machine_has_no_problems() -> None:
    assert problems(FIT) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"system": "Darwin"}, "nodes need Linux .* and this is Darwin"),
        ({"is_root": False}, "nodes need root .* sudo -E make cluster-up"),
        ({"missing_programs": ("nsenter", "unshare", "ip")}, "apt-get install util-linux iproute2$"),
        ({"has_overlay": False}, "modprobe overlay"),
        ({"has_bridge_filter": False}, "modprobe br_netfilter"),
        (
            {"free_bytes": 20 * 2**30},
            "20.0 GB are free in /home/user/.cache/quire/nodes, and images take 25: .* XDG_CACHE_HOME",
        ),
        ({"free_bytes": 2 * 2**30, "has_images": True}, "2.0 GB are free in .*, and images take 3: "),
        ({"state": Path("/run/user/0/quire")}, "/run/user/0/quire is below /run, .* set XDG_STATE_HOME"),
        ({"store": Path("/run/cache")}, "/run/cache is below /run, .* set XDG_CACHE_HOME"),
        ({"foreign_networks": ("10.0.0.0/8",)}, "uses 10.0.0.0/8 already, and the cluster needs 10.77.0.0/24, "),
        ({"foreign_networks": ("10.96.3.4/32",)}, "uses 10.96.3.4/32 already"),
    ],
)
def test_machine_problem_has_a_remedy(changes: Mapping[str, Any], message: str) -> None:
    (found,) = problems(replace(FIT, **changes))
    assert re.search(message, found)


def test_existing_images_need_no_disk_space() -> None:
    assert problems(replace(FIT, free_bytes=20 * 2**30, has_images=True)) == []


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems(replace(FIT, is_root=False, has_overlay=False, missing_programs=("ip",)))) == 3


def test_our_own_bridge_is_no_foreign_network() -> None:
    addresses = [
        {"ifname": "eth0", "addr_info": [{"family": "inet", "local": "192.0.2.2", "prefixlen": 24}]},
        {"ifname": "quire0", "addr_info": [{"family": "inet", "local": "10.77.0.1", "prefixlen": 24}]},
        {"ifname": "lo", "addr_info": [{"family": "inet6", "local": "::1", "prefixlen": 128}]},
    ]
    routes = [
        {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
        {"dst": "10.77.1.0/24", "gateway": "10.77.0.11", "dev": "quire0"},
        {"dst": "172.17.0.0/16", "dev": "docker0"},
    ]
    assert foreign_networks(addresses, routes) == ("192.0.2.2/24", "172.17.0.0/16")


MOUNTS = {
    "version 1": """\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
32 30 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
35 30 0:31 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
36 30 0:32 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
37 30 0:33 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
""",
    "controllers mounted together": """\
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
""",
    "version 2": "31 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
}


@pytest.mark.parametrize("layout", MOUNTS)
def test_control_groups_of_either_version_are_found(layout: str) -> None:
    found = cgroups.hierarchies(MOUNTS[layout])
    unified = "cpuset cpu io memory pids" if layout == "version 2" else ""
    assert cgroups.lacking(found, unified) == frozenset()


def test_every_hierarchy_counts_once() -> None:
    folders = {str(path) for path in cgroups.hierarchies(MOUNTS["version 1"]).values()}
    names = ("cpu", "cpuset", "memory", "pids", "devices", "systemd", "unified")
    assert folders == {f"/sys/fs/cgroup/{name}" for name in names}


def test_unmounted_cgroup_controller_is_named() -> None:
    assert cgroups.lacking(cgroups.hierarchies(MOUNTS["version 2"]), "cpu memory") == {"cpuset", "pids"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a host with one kernel setting, in a folder."""
    run, system = tmp_path / "run", tmp_path / "sys"
    (system / "kernel").mkdir(parents=True)
    (system / "kernel" / "panic").write_text("1\n")
    monkeypatch.setattr(machine, "RUN", run)
    monkeypatch.setattr(machine, "RECORD", run / "machine.json")
    monkeypatch.setattr(machine, "SYSTEM", system)
    monkeypatch.setattr(machine, "NETWORK_NAMESPACES", str(tmp_path / "log"))
    monkeypatch.setattr(machine, "OVER", (str(tmp_path / "kubelet"), str(tmp_path / "log")))
    (tmp_path / "log").mkdir()
    return tmp_path


def test_changes_are_reverted_and_created_objects_removed(host: Path) -> None:
    machine.claim(Path("/state/a"))
    (host / "sys/kernel/panic").write_text("10")
    machine.claim(Path("/state/a"))  # a second `up` must not record the changed value as the original one
    recorded = machine.read()
    assert recorded is not None
    recorded.restore()
    assert (host / "sys/kernel/panic").read_text() == "1"
    assert not (host / "kubelet").exists()
    assert (host / "log").exists()
    assert not (host / "run").exists()


def test_folder_with_new_files_is_not_removed(host: Path) -> None:
    recorded = machine.claim(Path("/state/a"))
    (host / "kubelet" / "theirs").touch()
    recorded.restore()
    assert (host / "kubelet" / "theirs").exists()


def test_a_second_cluster_is_rejected_with_instructions(host: Path) -> None:
    machine.claim(Path("/state/a"))
    with pytest.raises(MachineUnfit, match="cluster.py down --state-dir /state/a"):
        machine.claim(Path("/state/b"))


def test_truncated_record_is_ignored(host: Path) -> None:
    machine.claim(Path("/state/a"))
    machine.RECORD.write_text(json.dumps({"state": "/state/a"})[:10])
    assert machine.read() is None


def test_a_port_in_use_is_named_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "HOST_ADDRESS", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineUnfit, match=f"prometheus needs port {port} .*ss -lnp 'sport = :{port}'"):
            requirements.require_port(port, "prometheus")
    requirements.require_port(port, "prometheus")


@pytest.mark.parametrize(("file", "expected"), [("cpu.shares", "12288"), ("cpu.weight", "1200"), ("memory.max", "")])
def test_pods_get_the_processor_time_of_several_processes(file: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    cgroups.weigh(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {file: expected}
