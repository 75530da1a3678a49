"""The listening socket, bound before anything slow, so that a port in use is known at once."""

import errno
import socket
import stat
from pathlib import Path

from quire_engine.config import ServerOptions
from quire_engine.errors import AddressError

_BACKLOG = 2048


def listener_of(options: ServerOptions) -> socket.socket:
    """Raises AddressError."""
    return listen(options.host, options.port) if options.uds is None else listen_unix(options.uds)


def listen_unix(path: Path) -> socket.socket:
    """A socket that a process left behind is replaced; one that is listened on is not. Raises AddressError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "it exists and is in use, or no socket" if in_use else error.strerror or str(error)
        raise AddressError(f"cannot listen on --uds {path}: {reason}") from error
    listener.setblocking(False)
    return listener


def _is_left_behind(path: Path) -> bool:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def listen(host: str, port: int) -> socket.socket:
    """Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise AddressError(f"--host {host} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(_explanation(error, host, port)) from error
    listener.setblocking(False)
    return listener


def _explanation(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; choose one with --port, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this process lacks; choose one from 1024 on with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"
