"""The requirements on a machine with nodes, reported completely before any change.

`problems` is pure. `check` inspects the machine and installs Debian's packages of missing system programs as root.
"""

import ipaddress
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_cluster.debian import install_packages
from quire_cluster.errors import MachineUnfit
from quire_cluster.nodes.plan import BRIDGE, HOST_ADDRESS, SUBNETS
from quire_cluster.progress import Progress
from quire_cluster.shell import run, succeeds

# Required system programs and their Debian packages. None of these starts a service.
SYSTEM_PROGRAMS: Final[Mapping[str, str]] = {
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "unshare": "util-linux",
}
# Disk space for the images of both nodes, the registry and a build; and the minimum that must remain.
FREE_BYTES: Final = 25 * 2**30
FREE_BYTES_WITH_IMAGES: Final = 3 * 2**30
WAYS_OUT: Final = (
    "Without them: `cluster.py up --tier api` gives a control plane without nodes; and with KUBECONFIG set "
    "the end-to-end tests use a cluster of yours."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The relevant facts about the machine."""

    system: str
    is_root: bool
    missing_programs: tuple[str, ...]
    has_overlay: bool
    has_bridge_filter: bool
    free_bytes: int
    has_images: bool
    store: Path  # where images go
    state: Path
    foreign_networks: tuple[str, ...]  # addresses and routes that are not ours, in CIDR form


def problems(seen: Seen) -> list[str]:
    """Return all problems with their solutions."""
    if seen.system != "Linux":
        return [f"nodes need Linux (network namespaces, control groups), and this is {seen.system}"]
    found: list[str] = []
    if not seen.is_root:
        found.append("nodes need root (network namespaces, mounts, control groups): sudo -E make cluster-up")
    if seen.missing_programs:
        packages = dict.fromkeys(SYSTEM_PROGRAMS[program] for program in seen.missing_programs)
        found.append(f"not on PATH: {', '.join(seen.missing_programs)}. Debian: apt-get install {' '.join(packages)}")
    if not seen.has_overlay:
        found.append("the kernel has no overlay file system, on which containers' files are: modprobe overlay")
    if not seen.has_bridge_filter:
        found.append("the kernel does not filter bridged packets, as services need: modprobe br_netfilter")
    needed = FREE_BYTES_WITH_IMAGES if seen.has_images else FREE_BYTES
    if seen.free_bytes < needed:
        found.append(
            f"{seen.free_bytes / 2**30:.1f} GB are free in {seen.store}, and images take {needed / 2**30:.0f}: "
            "free some, or set XDG_CACHE_HOME to a larger disk"
        )
    found += [
        f"the folder {path} is below /run, which a node hides from itself: set {variable}"
        for path, variable in ((seen.state, "XDG_STATE_HOME"), (seen.store, "XDG_CACHE_HOME"))
        if path.is_relative_to("/run")
    ]
    taken = [network for network in seen.foreign_networks if _overlaps(network)]
    if taken:
        found.append(
            f"this machine uses {', '.join(taken)} already, and the cluster needs {', '.join(SUBNETS)}: "
            "stop what uses them (`ip route` tells)"
        )
    return found


def check(state: Path, store: Path, progress: Progress) -> None:
    """Check the machine. Raise MachineUnfit with all problems."""
    if platform.system() == "Linux" and os.geteuid() == 0:
        _install_missing(progress)
        _load_modules()
    found = problems(_look(state, store))
    if found:
        listed = "\n".join(f"  - {problem}" for problem in found)
        raise MachineUnfit(f"this machine cannot hold nodes as it is:\n{listed}\n{WAYS_OUT}")


def require_port(port: int, server: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Check the port. Raise MachineUnfit if it is in use at the bridge's address; the bridge must exist."""
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:  # connections of a server that was killed may linger; listeners still count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST_ADDRESS, port))
        except OSError as error:
            raise MachineUnfit(
                f"{server} needs port {port} of {HOST_ADDRESS}, and another program listens there ({error.strerror}): "
                f"`ss -lnp 'sport = :{port}'` names it; stop it, or have it listen on 127.0.0.1 alone"
            ) from error


def foreign_networks(addresses: Iterable[Mapping[str, Any]], routes: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the networks of other links from the output of `ip -json`."""
    of_links = (
        f"{address['local']}/{address['prefixlen']}"
        for link in addresses
        if link.get("ifname") != BRIDGE
        for address in link.get("addr_info", ())
        if address.get("family") == "inet"
    )
    of_routes = (
        str(route["dst"]) for route in routes if route.get("dev") != BRIDGE and route.get("dst", "default") != "default"
    )
    return tuple(dict.fromkeys((*of_links, *of_routes)))


def _overlaps(network: str) -> bool:
    used = ipaddress.ip_network(network, strict=False)
    return any(used.overlaps(ipaddress.ip_network(subnet)) for subnet in SUBNETS)


def _look(state: Path, store: Path) -> Seen:
    has_ip = shutil.which("ip") is not None
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    return Seen(
        system=platform.system(),
        is_root=os.geteuid() == 0,
        missing_programs=_missing(),
        has_overlay="overlay" in _read("/proc/filesystems"),
        has_bridge_filter=_has_bridge_filter(),
        free_bytes=shutil.disk_usage(existing).free,
        has_images=any((store.parent / "registry").glob("docker/registry/v2/repositories/*")),
        store=store,
        state=state,
        foreign_networks=foreign_networks(_ip("address"), _ip("route")) if has_ip else (),
    )


def _ip(what: str) -> list[dict[str, Any]]:
    printed: list[dict[str, Any]] = json.loads(run(["ip", "-json", what, "show"]) or "[]")
    return printed


def _missing() -> tuple[str, ...]:
    return tuple(program for program in SYSTEM_PROGRAMS if shutil.which(program) is None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _install_missing(progress: Progress) -> None:
    packages = list(dict.fromkeys(SYSTEM_PROGRAMS[program] for program in _missing()))
    if not packages or shutil.which("apt-get") is None:
        return
    progress.say(f"==> installing {' '.join(packages)} from Debian (no service is started by them)")
    if (problem := install_packages(packages)) is not None:
        raise MachineUnfit(f"{' '.join(packages)} could not be installed: {problem}")


def _load_modules() -> None:
    """Load kernel modules if they exist as modules; `problems` reports what is missing afterwards."""
    if shutil.which("modprobe") is None:
        return
    for module, sign in (("overlay", "overlay" in _read("/proc/filesystems")), ("br_netfilter", _has_bridge_filter())):
        if not sign:
            succeeds(["modprobe", module])


def _has_bridge_filter() -> bool:
    return Path("/proc/sys/net/bridge").exists()
