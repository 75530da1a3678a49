"""Clients of a server that was killed."""

import gc
import socket
import ssl
import struct
import warnings

import pytest

from quire_cluster.tls import ClosedIfLost


def test_a_socket_is_closed_if_its_server_is_lost_before_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        # A linger of zero resets the connection, as the kernel does for a killed process with unread data.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(OSError):
            while True:
                client.getpeername()
        context = ssl.create_default_context()
        context.sslsocket_class = ClosedIfLost
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ConnectionResetError, match="before TLS"):
                context.wrap_socket(client, server_hostname="localhost")
            gc.collect()
