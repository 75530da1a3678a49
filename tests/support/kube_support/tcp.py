"""A TCP proxy on loopback that can drop all data of its connections without closing them, like a failing network.

It only forwards bytes (TLS passes through), and new connections work. It runs in its own thread.
"""

import asyncio
import json
import socket
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
    """A proxy in front of the API server; `kubeconfig` is the given one with the proxy's address."""

    def __init__(self, server: ControlPlane, kubeconfig: Path) -> None:
        address = urlsplit(server.server.url)
        self._host, self._upstream = str(address.hostname), int(address.port or 0)
        self._connections: dict[asyncio.Task[None], _Connection] = {}
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
        """Drop all data of the current connections in both directions, also their end. Return their number."""
        connections = list(self._connections.values())
        for connection in connections:
            connection.is_lost = True
        return len(connections)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        # asyncio's own server would leave connections open that it was about to accept when the loop ends.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            self._port = listening.getsockname()[1]
            self._loop.add_reader(listening, self._accept, listening)
            started.set()
            await self._stopping.wait()
            self._loop.remove_reader(listening)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0.1)  # aborted transports close their sockets in later iterations of the loop

    def _accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except BlockingIOError:
            return
        connection = _Connection()
        task = self._loop.create_task(self._carry(connection, client))
        self._connections[task] = connection

        def over(task: asyncio.Task[None]) -> None:
            del self._connections[task]
            client.close()  # its task may not have started

        task.add_done_callback(over)

    async def _carry(self, connection: _Connection, client: socket.socket) -> None:
        client.setblocking(False)
        ends: list[asyncio.StreamWriter] = []
        try:
            asked, writer = await asyncio.open_connection(sock=client)
            ends.append(writer)
            answers, to_server = await asyncio.open_connection(self._host, self._upstream)
            ends.append(to_server)
            await asyncio.gather(_pump(connection, asked, to_server), _pump(connection, answers, writer))
            if connection.is_lost:
                await self._stopping.wait()  # neither end is informed that the other has closed
        except OSError:
            return  # the server is away
        finally:
            for end in ends:
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
