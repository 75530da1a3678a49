"""The listening socket, which is bound before anything slow so that a port in use is reported at once."""

import errno
import socket
import stat
from pathlib import Path

from quire_engine.config import ServerOptions
from quire_engine.errors import AddressError

_BACKLOG = 2048


def listener_of(options: ServerOptions) -> socket.socket:
    """Return the listening socket that the options name. Raises AddressError."""
    return listen(options.host, options.port) if options.uds is None else listen_unix(options.uds)


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket, which replaces one that an ended process left there. Raises AddressError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "the path is in use, or is not a socket" if in_use else error.strerror or str(error)
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
    """Return a listening TCP socket. Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AddressError(f"--host {host} is not an address of this machine: {reason}") from error
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
        return f"port {port} on {host} is in use; choose another one with --port (0 picks a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges that this process does not have; choose --port 1024 or higher"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"
