"""The proxy that loses connections, with a server of the test: bytes pass or are lost, and all sockets are closed."""

import gc
import json
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from kube_support.tcp import TcpProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """Yield the port of a server that echoes its input."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with connection:
                while told := connection.recv(100):
                    connection.sendall(told)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def proxy_of(port: int, folder: Path) -> tuple[TcpProxy, tuple[str, int]]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps({"clusters": [{"cluster": {}}]}))
    proxy = TcpProxy(SimpleNamespace(server=SimpleNamespace(url=f"https://127.0.0.1:{port}")), kubeconfig)  # type: ignore[arg-type]
    url = urlsplit(json.loads(proxy.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    return proxy, (str(url.hostname), int(url.port or 0))


def test_lost_connections_stay_lost_and_new_ones_work(echo: int, tmp_path: Path) -> None:
    proxy, address = proxy_of(echo, tmp_path)
    with socket.create_connection(address) as old:
        old.sendall(b"one")
        assert old.recv(100) == b"one"
        assert proxy.lose_connections() == 1
        old.sendall(b"two")
        with socket.create_connection(address) as new:
            new.sendall(b"three")
            assert new.recv(100) == b"three"
        old.settimeout(0.2)
        with pytest.raises(TimeoutError):
            old.recv(100)
    proxy.stop()


def test_proxy_closes_all_sockets_whenever_it_stops(
    echo: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An open socket is a warning and therefore an error of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # what earlier tests have left is not the proxy's
    for _ in range(20):
        proxy, address = proxy_of(echo, tmp_path)
        ends = [socket.create_connection(address) for _ in range(5)]
        proxy.stop()
        gc.collect()
        for end in ends:
            end.close()
    assert caplog.records == []
