"""quire-engine as processes: started, used, killed, drained. The fake runner starts within a second."""

import gc
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from quire_engine import flags
from quire_engine.api import serve

MODEL = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
BODY: dict[str, Any] = {"model": "demo", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}
Start = Callable[..., AbstractContextManager[Any]]


def stream(server: Any, max_tokens: int) -> Any:
    """Return the stream of a chat that has started."""
    return server.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True},
    )


def finish_reason(chunks: Any) -> str | None:
    *_, last = chunks
    reason: str | None = last.choices[0].finish_reason
    return reason


def complete(server: Any, **fields: Any) -> httpx.Response:
    response: httpx.Response = server.http.post("/v1/completions", json={**BODY, "max_tokens": 3, **fields})
    return response


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


# --- the end of a server ---


def test_sigterm_lets_every_stream_finish(start_server: Start) -> None:
    with start_server(fake={"step_seconds": 0.01}) as server:
        streams = [stream(server, 100) for _ in range(8)]
        server.child.send_signal(signal.SIGTERM)
        server.until_status("/readyz", 503)
        assert server.http.get("/livez").status_code == 200
        with pytest.raises(openai.InternalServerError, match="draining"):
            stream(server, 1)
        assert [finish_reason(chunks) for chunks in streams] == ["length"] * 8
        assert server.child.wait(60) == 0


def test_requests_that_outlast_the_drain_timeout_get_an_error(start_server: Start) -> None:
    with start_server("--drain-timeout", "300ms", fake={"step_seconds": 0.02}) as server:
        chunks = stream(server, 4000)
        server.child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="drain timeout of 0.3 s is over"):
            finish_reason(chunks)
        assert server.child.wait(60) == 0


def test_second_ctrl_c_stops_immediately(start_server: Start) -> None:
    with start_server(fake={"step_seconds": 0.02}) as server:
        chunks = stream(server, 4000)
        server.child.send_signal(signal.SIGINT)
        server.until_status("/readyz", 503)
        server.child.send_signal(signal.SIGTERM)  # a supervisor may send it; it is not a second Ctrl-C
        time.sleep(0.1)
        assert server.child.poll() is None
        server.child.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            finish_reason(chunks)
        assert server.child.wait(60) == 130


# --- clients that leave or do not read ---


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_client_that_does_not_read_delays_no_other_client(start_server: Start) -> None:
    with start_server(fake={"step_seconds": 0.001}) as server:
        complete(server)
        before = resident_bytes(server.child.pid)
        with socket.socket() as idle:
            # Small, but larger than a segment of loopback: below that, only a timer opens a full window again.
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
            idle.connect(server.host_and_port)
            body = json.dumps({**BODY, "stream": True, "logprobs": 20, "n": 8})
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {server.key}\r\ncontent-length: {len(body)}\r\n\r\n"
            idle.sendall((head + body).encode())
            # Only this request has so many tokens: the number of running requests may still contain the one before.
            server.until(lambda: server.metric("vllm:generation_tokens_total") >= 50, seconds=60)
            while server.metric("vllm:num_requests_running"):
                answer = complete(server, max_tokens=5)
                assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
            assert resident_bytes(server.child.pid) - before < 40 * 2**20
            idle.settimeout(60)
            said = b""
            while b"slow_reader" not in said and (part := idle.recv(2**16)):
                said = (said + part)[-1000:]
        assert b"event: error" in said and b"slow_reader" in said and b"[DONE]" not in said
        assert server.http.get("/readyz").status_code == 200


# --- an engine process that is lost ---


def test_a_killed_engine_process_fails_only_running_requests(start_server: Start) -> None:
    with start_server(fake={"step_seconds": 0.02}) as server:
        streams = [stream(server, 3000) for _ in range(3)]
        before = server.engine_pid()
        os.kill(before, signal.SIGKILL)
        for chunks in streams:
            with pytest.raises(openai.APIError, match="the engine stopped while this request was under way"):
                finish_reason(chunks)
        server.until_status("/readyz", 200)
        assert finish_reason(stream(server, 5)) == "length"
        assert server.engine_pid() != before
        assert server.metric("quire_engine_restarts_total") == 1
        assert server.metric("vllm:request_success_total", finished_reason="error") == 3


# --- what only a process has: TLS, a Unix socket, traces, origins, keys ---


def test_a_certificate_is_renewed_under_a_running_stream(start_server: Start, tmp_path: Path) -> None:
    authorities = trustme.CA(), trustme.CA()
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def issue(number: int) -> None:
        leaf = authorities[number].issue_cert("127.0.0.1")
        for path, content in ((key, leaf.private_key_pem), (certificate, leaf.cert_chain_pems[0])):
            content.write_to_path(str(path) + ".new")
            os.replace(str(path) + ".new", path)

    def client(number: int) -> httpx.Client:
        context = ssl.create_default_context()
        authorities[number].configure_trust(context)
        return httpx.Client(base_url=server.address, verify=context, headers=server.http.headers, timeout=20)

    def is_renewed() -> bool:
        try:
            with client(1) as new:
                return new.get("/readyz").status_code == 200
        except httpx.ConnectError:
            return False

    issue(0)
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with start_server(*tls, fake={"step_seconds": 0.005}) as server, client(0) as old:
        assert server.address.startswith("https://127.0.0.1:")
        body = {**BODY, "max_tokens": 300, "stream": True}
        with old.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            issue(1)
            server.until(is_renewed, seconds=60)  # the file is checked once a second
            assert list(lines)[-2] == "data: [DONE]"
        assert server.ends() == 0


def test_unix_socket_serves_and_is_removed_at_exit(start_server: Start, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:  # from a process that was killed
        left_behind.bind(str(path))
    with start_server("--uds", str(path), fake={}) as server:
        assert server.address == f"unix:{path}"
        transport, headers = httpx.HTTPTransport(uds=str(path)), server.http.headers
        with httpx.Client(transport=transport, base_url="http://engine", headers=headers, timeout=20) as http:
            assert http.post("/v1/completions", json={**BODY, "max_tokens": 3}).status_code == 200
            # Processes that can reach the file are on this host.
            assert http.post("/admin/cache/reset").status_code == 200
            second = run("--model", str(MODEL), "--uds", str(path))
            assert second.returncode == 1 and "in use" in second.stderr and len(second.stderr.splitlines()) == 1
            assert http.get("/readyz").status_code == 200
        assert server.ends() == 0
    assert not path.exists()


def test_a_missing_collector_neither_logs_nor_delays_the_end(start_server: Start) -> None:
    """The server also answers the preflight requests of pages from an allowed origin, and of no others."""
    origin = "https://chat.example.com"
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with start_server("--otlp-traces-endpoint", endpoint, "--allowed-origins", origin, fake={}) as server:
            asked = server.http.options("/v1/chat/completions", headers=asks)
            assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
            refused = server.http.options("/v1/chat/completions", headers={**asks, "origin": "https://evil.example"})
            assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
            answer = server.http.get("/v1/models", headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == origin
            for _ in range(10):
                answer = complete(server)
                assert answer.status_code == 200 and answer.headers["traceparent"].startswith("00-")
            assert server.ends() == 0
    assert len(server.log) < 16 and "Traceback" not in "".join(server.log), "".join(server.log)


@pytest.mark.parametrize("sharing", ["tenant", "all"])
def test_key_finds_prompts_of_another_only_where_they_share(start_server: Start, sharing: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("name=tester test-key-1\nname=alice key-of-alice\nname=bob key-of-bob\n")
    keys.chmod(0o600)
    secret = {**BODY, "prompt": "the quick brown fox jumps over the lazy dog " * 8, "max_tokens": 1}

    def cached(key: str) -> int:
        answer = server.http.post("/v1/completions", json=secret, headers={"authorization": f"Bearer {key}"})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    with start_server("--api-key-file", str(keys), "--share-prefixes", sharing, fake={}) as server:
        assert cached("key-of-alice") == 0
        own = cached("key-of-alice")
        assert own > 0
        assert cached("key-of-bob") == (own if sharing == "all" else 0)


# --- a server that does not start ---


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire_engine", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder without weights."""
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((MODEL / "tokenizer.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        ("", 2, "--model is missing"),
        ("--model {folder}", 2, "no *.safetensors"),
        ("--model {folder} --load-format dummy --port {taken}", 1, "is in use; "),
        ("--model {folder} --load-format dummy --port 0 --api-key-file /none", 2, "cannot be read"),
    ],
)
def test_user_errors_fit_one_screen_without_a_traceback(folder: Path, arguments: str, status: int, part: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        done = run(*arguments.format(folder=folder, taken=taken.getsockname()[1]).split())
    assert done.returncode == status and part in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 5 and done.stdout == ""


def test_corrupt_tokenizer_is_reported_in_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    done = run("--model", str(folder), "--load-format", "dummy", "--port", "0")
    assert done.returncode == 2 and "tokenizer.json" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_starts_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire_engine", "--model", str(MODEL), "--host", "127.0.0.1", "--port", "0"]

    def heard() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it

    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        while not list(tmp_path.glob("quire-*/engine")):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_help_version_and_schema_need_no_model() -> None:
    assert "usage: quire-engine --model DIR" in run("--help").stdout
    assert run("--version").stdout == "quire-engine 0.1.0\n"
    assert json.loads(run("--flag-schema").stdout)["required"] == ["model"]


def test_the_api_process_imports_no_heavy_library() -> None:
    """Neither tensors nor the engine are imported, nor the exporter of traces without an endpoint."""
    program = (
        "import sys, quire_engine.__main__, quire_engine.api.serve\n"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'quire_kernels', 'quire_engine.engine', 'requests',\n"
        "         'opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
