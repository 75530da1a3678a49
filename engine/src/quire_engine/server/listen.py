"""The listening socket, bound before anything slow, so that a port in use is known at once."""

import errno
import socket

from quire_engine.errors import AddressError

_BACKLOG = 2048


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
