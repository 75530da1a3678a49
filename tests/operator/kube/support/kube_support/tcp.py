"""A TCP proxy on loopback that can swallow what its connections carry without closing them: a network that lost them.

It sees bytes alone (TLS passes through), and new connections are well. Runs in a thread of its own.
"""

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from quire_cluster.control_plane import ControlPlane

CHUNK = 2**16


@dataclass(slots=True)
class _Connection:
    is_lost: bool = False


class TcpProxy:
    """In front of the API server; `kubeconfig` is the given one with the proxy's address."""

    def __init__(self, server: ControlPlane, kubeconfig: Path) -> None:
        address = urlsplit(server.server.url)
        self._host, self._upstream = str(address.hostname), int(address.port or 0)
        self._connections: list[_Connection] = []
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._port = 0
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        document = json.loads(kubeconfig.read_text())
        document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = kubeconfig.with_suffix(".tcp")
        self.kubeconfig.write_text(json.dumps(document))

    def lose_connections(self) -> int:
        """Those there are now carry nothing any more, in either direction, not even their end. How many."""
        for connection in self._connections:
            connection.is_lost = True
        return len(self._connections)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stopping.wait()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        try:
            to_server = await asyncio.open_connection(self._host, self._upstream)
        except OSError:
            writer.close()
            return
        self._connections.append(connection)
        try:
            pumps = (_pump(connection, reader, to_server[1]), _pump(connection, to_server[0], writer))
            await asyncio.gather(*pumps)
            if connection.is_lost:
                await self._stopping.wait()  # neither end is told that the other has gone
        finally:
            self._connections.remove(connection)
            for end in (writer, to_server[1]):
                end.transport.abort()


async def _pump(connection: _Connection, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    try:
        while chunk := await source.read(CHUNK):
            if not connection.is_lost:
                to.write(chunk)
                await to.drain()
    except ConnectionError:
        pass
    if not connection.is_lost:
        to.close()
