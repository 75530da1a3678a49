"""The network interface on which NCCL and gloo listen: the one over which the nodes of a group have met.

Without a choice, these libraries take some interface of the machine, which may be open to more than the group.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

_log = logging.getLogger(__name__)
_SIOCGIFADDR = 0x8915
_ADDRESS_IN_REQUEST = slice(20, 24)
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def choose_interface(connection: socket.socket, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of NCCL and gloo that are not set yet; ``connection`` is one to another node."""
    own = ipaddress.ip_address(connection.getsockname()[0].partition("%")[0])
    if isinstance(own, ipaddress.IPv6Address):
        own = own.ipv4_mapped or own
    name = interface_of(own)
    if name is None:
        _log.warning("no network interface has the address %s: set NCCL_SOCKET_IFNAME if the model runs on GPUs", own)
        return
    environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one, not all whose names begin so
    environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET" if own.version == 4 else "AF_INET6")
    environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Return the name of this machine's interface with an address, or None."""
    if address.is_loopback:
        return "lo"
    if isinstance(address, ipaddress.IPv6Address):
        return _interface_with_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if found[_ADDRESS_IN_REQUEST] == address.packed:
                return name
    return None


def _interface_with_ipv6(address: ipaddress.IPv6Address) -> str | None:
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.startswith(address.packed.hex())), None)
