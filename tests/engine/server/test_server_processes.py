"""A real quire-engine process in operation: TLS, a Unix socket, traces, the hang limit."""

import asyncio
import gc
import json
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from server_children import engine_process

from quire_engine import flags
from quire_engine.server import serve

MODEL = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
BODY = {"model": "quire-demo", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}


def test_garbage_collector_skips_objects_loaded_before_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection of the loaded modules stops the event loop for longer than 50 ms."""
    frozen: list[int] = []

    class Server:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def run(self) -> int:
            frozen.append(gc.get_freeze_count())
            return 0

    monkeypatch.setattr(serve, "_Server", Server)
    monkeypatch.setattr(serve.logs, "set_up", lambda _: None)
    config = flags.parse(["--model", str(MODEL)], {})
    gc.unfreeze()
    try:
        assert serve.serve(config, None, None, socket.socket()) == 0  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


@dataclass
class Process:
    child: asyncio.subprocess.Process
    address: str
    log: list[str]

    def http(self, **options: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, timeout=20, **options)  # type: ignore[arg-type]

    def engine_pid(self) -> int:
        return engine_process(self.child.pid)

    async def ends(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.child.wait(), 60)


@asynccontextmanager
async def started(
    *flags: str, listens: tuple[str, ...] = ("--host", "127.0.0.1", "--port", "0"), **runner: object
) -> AsyncIterator[Process]:
    """Yield a ready server with the fake runner."""
    options = json.dumps({"vocab_size": 4096, **runner})
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_engine.server.fake", options),
        *("--model", str(MODEL), "--threads", "1", *listens, *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    log: list[str] = []
    try:
        async with asyncio.timeout(30):
            while not re.search(r" ready: quire-demo", "".join(log[-1:])):
                line = await child.stderr.readline()
                assert line, "".join(log)
                log.append(line.decode())
        reading = asyncio.create_task(_collect(child.stderr, log))
        found = re.search(r"listening on (\S+);", "".join(log))
        assert found is not None
        yield Process(child, found[1], log)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    await reading


async def _collect(stream: asyncio.StreamReader, log: list[str]) -> None:
    while line := await stream.readline():
        log.append(line.decode())


async def until(http: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(20):
        while (await http.get(path)).status_code != status:
            await asyncio.sleep(0.02)


async def test_a_certificate_is_renewed_under_a_running_stream(tmp_path: Path) -> None:
    authorities = trustme.CA(), trustme.CA()
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def issue(number: int) -> None:
        leaf = authorities[number].issue_cert("127.0.0.1")
        for path, content in ((key, leaf.private_key_pem), (certificate, leaf.cert_chain_pems[0])):
            content.write_to_path(str(path) + ".new")
            os.replace(str(path) + ".new", path)

    def trusting(number: int) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authorities[number].configure_trust(context)
        return context

    issue(0)
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    async with started(*tls, step_seconds=0.005) as process, process.http(verify=trusting(0)) as http:
        assert process.address.startswith("https://127.0.0.1:")
        body = {**BODY, "max_tokens": 300, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            issue(1)
            async with asyncio.timeout(60):
                while True:
                    try:
                        async with process.http(verify=trusting(1)) as new:
                            assert (await new.get("/readyz")).status_code == 200
                        break
                    except httpx.ConnectError:  # it is checked once a second
                        await asyncio.sleep(0.1)
            assert [line async for line in lines][-2] == "data: [DONE]"
        assert await process.ends() == 0


async def test_unix_socket_serves_and_is_removed_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:  # from a process that was killed
        left_behind.bind(str(path))
    async with started(listens=("--uds", str(path))) as process:
        assert process.address == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=20) as http:
            assert (await http.post("/v1/completions", json={**BODY, "max_tokens": 3})).status_code == 200
            assert (
                await http.post("/admin/cache/reset")
            ).status_code == 200  # processes that can reach the file are on this host
            second = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "quire_engine", "--model", str(MODEL), "--uds", str(path)),
                stderr=asyncio.subprocess.PIPE,
            )
            _, told = await asyncio.wait_for(second.communicate(), 60)
            assert second.returncode == 1 and b"in use" in told and len(told.splitlines()) == 1
            assert (await http.get("/readyz")).status_code == 200
        assert await process.ends() == 0
    assert not path.exists()


@pytest.mark.parametrize("busy", [True, False])
async def test_a_stopped_engine_process_is_detected_and_replaced(busy: bool) -> None:
    async with started("--engine-hang-timeout", "2s", step_seconds=0.005) as process, process.http() as http:
        hung = process.engine_pid()
        async with asyncio.TaskGroup() as tasks:
            if busy:
                asking = tasks.create_task(http.post("/v1/completions", json=BODY))
                while not await metric(http, "vllm:num_requests_running{.*}"):
                    await asyncio.sleep(0.02)
            os.kill(hung, signal.SIGSTOP)
            began = asyncio.get_running_loop().time()
            await until(http, "/readyz", 503)
            assert asyncio.get_running_loop().time() - began < 30  # the limit (60 s by default), and a busy machine
            assert (await http.get("/livez")).status_code == 200
        if busy:
            answer = asking.result()
            assert answer.status_code == 503 and "made no step for 2 s" in answer.json()["error"]["message"]
        await until(http, "/readyz", 200)
        assert process.engine_pid() != hung and not Path(f"/proc/{hung}").exists()
        assert (await http.post("/v1/completions", json={**BODY, "max_tokens": 3})).status_code == 200


async def test_a_missing_collector_neither_logs_nor_delays_the_end() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with started("--otlp-traces-endpoint", endpoint) as process, process.http() as http:
            for _ in range(10):
                answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 3})
                assert answer.status_code == 200 and answer.headers["traceparent"].startswith("00-")
            assert await process.ends() == 0
    assert len(process.log) < 12 and "Traceback" not in "".join(process.log), "".join(process.log)


async def test_web_pages_may_call_only_where_their_origin_is_allowed() -> None:
    origin = "https://chat.example.com"
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with started("--allowed-origins", origin) as process, process.http() as http:
        asked = await http.options("/v1/chat/completions", headers=asks)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
        refused = await http.options("/v1/chat/completions", headers={**asks, "origin": "https://evil.example"})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        answer = await http.get("/v1/models", headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin


async def test_a_client_that_does_not_read_delays_no_other_client() -> None:
    async with started(step_seconds=0.001) as process, process.http() as http:
        await http.post("/v1/completions", json={**BODY, "max_tokens": 3})
        before = resident_bytes(process.child.pid)
        host, _, port = process.address.removeprefix("http://").partition(":")
        with socket.socket() as idle:
            # Small, but larger than a segment of loopback: below that, only a timer opens a full window again.
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
            idle.connect((host, int(port)))
            body = json.dumps({**BODY, "stream": True, "logprobs": 20, "n": 8}).encode()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            )
            idle.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(60):
                # Only this request has so many tokens: the number of running requests may still contain the one before.
                while await metric(http, "vllm:generation_tokens_total{.*}") < 50:
                    await asyncio.sleep(0.01)
                while await metric(http, "vllm:num_requests_running{.*}"):
                    answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 5})
                    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
            assert resident_bytes(process.child.pid) - before < 40 * 2**20
            idle.settimeout(60)
            said = b""
            while b"slow_reader" not in said and (part := idle.recv(2**16)):
                said = (said + part)[-1000:]
        assert b"event: error" in said and b"slow_reader" in said and b"[DONE]" not in said
        assert (await http.get("/readyz")).status_code == 200


async def metric(http: httpx.AsyncClient, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", (await http.get("/metrics")).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("sharing", ["tenant", "all"])
async def test_key_finds_prompts_of_another_only_where_they_share(sharing: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("name=alice key-of-alice\nname=bob key-of-bob\n")
    keys.chmod(0o600)
    secret = {**BODY, "prompt": "the quick brown fox jumps over the lazy dog " * 8, "max_tokens": 1}

    async def cached(http: httpx.AsyncClient, key: str) -> int:
        answer = await http.post("/v1/completions", json=secret, headers={"Authorization": f"Bearer {key}"})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    async with started("--api-key-file", str(keys), "--share-prefixes", sharing) as process, process.http() as http:
        assert await cached(http, "key-of-alice") == 0
        own = await cached(http, "key-of-alice")
        assert own > 0
        assert await cached(http, "key-of-bob") == (own if sharing == "all" else 0)
