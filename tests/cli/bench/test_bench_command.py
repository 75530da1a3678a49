"""``quire bench`` against a server of the test: its requests, its measurements, and its output."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from quire_cli.bench.command import bench

app = typer.Typer()
app.command()(bench)

BROKEN = {
    "error": b'data: {"error": {"message": "engine died"}}',
    "text": b'data: {"error": "out of memory", "error_type": "overloaded"}',
    "half": b'data: {"choices": [',
    "list": b"data: [1]",
    "usage": b'data: {"choices": [], "usage": {"prompt_tokens": null}}',
}
"""Events with which a faulty stream ends."""


@dataclass
class FakeServer:
    """A server that streams ``max_tokens`` words; ``fault`` may answer instead."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    fault: Callable[[int], str | None] = lambda number: None
    under_way: int = 0
    most_under_way: int = 0
    together: int = 1
    """The requests that the first ones wait for, so that so many are certainly under way at once."""
    met: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self.fault(len(self.bodies))
        if fault == "busy":
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way >= self.together:
            self.met.set()
        await self.met.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            piece = {"delta": {"content": f"w{number} "}} if chat else {"text": f"w{number} "}
            data = json.dumps({"choices": [piece | {"index": 0, "finish_reason": None}]}).encode()
            # Split the event so that it arrives in two reads.
            await response.write(b"data: " + data[:9])
            await response.write(data[9:] + b"\n\n")
            if fault == "cut":
                request.transport.abort()  # type: ignore[union-attr]
                return response
            if fault in BROKEN:
                await response.write(BROKEN[fault] + b"\n\n")
                return response
        prompt = sum(len(m["content"].split()) for m in body["messages"]) if chat else len(body["prompt"])
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.under_way -= 1
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Yield a server in its own thread, because the command runs its own event loop."""
    fake = FakeServer()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/v1/models", fake.models)
        application.router.add_post("/v1/completions", fake.complete)
        application.router.add_post("/v1/chat/completions", fake.complete)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    def run_to_its_end() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run_to_its_end)
    thread.start()
    assert ready.wait(120)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


def run(server: FakeServer, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["--base-url", server.url, "--warmup", "0", *arguments])


def test_a_run_reports_every_token_and_writes_its_files(server: FakeServer, tmp_path: Path) -> None:
    out, plot, server.together = tmp_path / "deep" / "out.json", tmp_path / "out.png", 3
    result = run(
        server, "--requests", "12", "--concurrency", "3", "--input-tokens", "20", "--output-tokens", "5",
        "--slo-ttft", "30s", "--json", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "12 of 12" in result.output
    assert "goodput" in result.output
    document = json.loads(out.read_text())
    assert (document["summary"]["prompt_tokens"], document["summary"]["output_tokens"]) == (240, 60)
    assert all(len(request["chunk_gaps_seconds"]) == 4 for request in document["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert server.most_under_way == 3
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_chat_turns_contain_earlier_turns(server: FakeServer) -> None:
    result = run(
        server, "--endpoint", "chat", "--requests", "1", "--turns", "3", "--input-tokens", "4", "--output-tokens", "2"
    )
    assert result.exit_code == 0, result.output
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    assert server.bodies[1]["messages"][1]["content"] == "w0 w1 "


def test_a_trace_sets_arrivals_and_lengths(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0,30,4\n2023-11-16 18:17:04.0,50,2\n"
    )
    result = run(server, "--trace", str(trace), "--speed", "10", "--scale-input", "0.1")
    assert result.exit_code == 0, result.output
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(3, 4), (5, 2)]


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        ("busy", "HTTP 429: queue is full"),
        ("cut", "error"),
        ("error", "error in the stream: engine died"),
        ("text", "error in the stream: out of memory"),
        ("half", "cannot be read"),
        ("list", "cannot be read"),
        ("usage", "cannot be read"),
    ],
)
def test_a_failed_request_is_counted_named_and_fails_the_command(server: FakeServer, fault: str, reported: str) -> None:
    server.fault = lambda number: fault if number == 2 else None
    result = run(server, "--requests", "4", "--concurrency", "1", "--output-tokens", "3")
    assert result.exit_code == 1
    assert "3 of 4" in result.output
    assert reported in result.output


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--base-url", "http://127.0.0.1:9/v1"], "no OpenAI-compatible server answers"),
        (["--base-url", "localhost:8000"], "is not an http or https URL"),
        (["--model", "other"], "does not serve 'other'; it serves: m"),
        (["--slo-ttft", "soon"], "not a duration"),
        (["--token-ids", "9:1"], "not a range"),
        (["--trace", "/nowhere.csv"], "cannot read the trace"),
        (["--requests", "0"], "--requests"),
        (["--plot", "out.doc"], "--plot out.doc should end in .png, .svg or .pdf"),
        (["--json", "/dev/null/out.json"], "/dev/null/out.json cannot be written"),
    ],
)
def test_wrong_argument_is_one_error_message(server: FakeServer, arguments: list[str], reported: str) -> None:
    result = run(server, *arguments)
    assert result.exit_code == 2
    assert reported in result.output
    assert "Traceback" not in result.output
