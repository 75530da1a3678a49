"""Long streams beside a scenario: each is told by the replica that served it, and whether it came whole."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic

from e2e_support.scaling.long_streams import LongStream, LongStreams, tokens_lasting, under_way
from e2e_support.traffic.prompts import Kind, of_kind

TOKENS = 300
KNOWN = {prompt.text: list(prompt.token_ids) for prompt in of_kind(Kind.LONG)}


class Engine(BaseHTTPRequestHandler):
    """Answers as a replica does; `cut` ends the body in its midst."""

    cut = False
    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = body["max_tokens"]
        tokens = (KNOWN[body["prompt"]] + [7] * wanted)[:wanted]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("X-Quire-Replica", "space/pod-1")
        self.end_headers()
        self._say({"choices": [{"token_ids": tokens[:-1], "finish_reason": None}]})
        if not self.cut:
            self._say({"choices": [{"token_ids": tokens[-1:], "finish_reason": "length"}]})
            self._say({"choices": [], "usage": {"completion_tokens": wanted}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def served(*, cut: bool = False) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Engine,), {"cut": cut}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def some_streams(url: str) -> list[LongStream]:
    with LongStreams(url, "chat", at_once=2, tokens=TOKENS, clock=monotonic) as streams:
        deadline = monotonic() + 20
        while not streams.ended and monotonic() < deadline:
            threading.Event().wait(0.01)
        return streams.finish()


def test_whole_streams_are_told_by_their_replica():
    with served() as url:
        streams = some_streams(url)
    assert streams
    assert {(one.replica, one.tokens, one.problem) for one in streams} == {("space/pod-1", TOKENS, None)}
    assert all(one.started <= one.ended for one in streams)


def test_a_stream_that_breaks_off_says_after_how_many_tokens():
    with served(cut=True) as url:
        streams = some_streams(url)
    assert {one.problem for one in streams} == {"the body ended without [DONE]"}
    assert {one.tokens for one in streams} == {TOKENS - 1}


def test_a_server_that_is_not_there_is_a_problem_of_the_stream():
    with served() as url:
        pass
    streams = some_streams(url)
    assert all(one.problem is not None and "ConnectError" in one.problem and one.replica is None for one in streams)


def test_tokens_are_as_many_as_a_machine_gives_in_the_time():
    with served() as url:
        assert tokens_lasting(1000.0, url, "chat") == 3500, "at most what the model can"
        assert tokens_lasting(0.0, url, "chat") == 150, "and so many that a stream is one"


def test_how_many_were_under_way_at_each_time():
    def stream(started: float, ended: float) -> LongStream:
        return LongStream(replica=None, started=started, ended=ended, tokens=1, problem=None)

    points = under_way([stream(1.0, 4.0), stream(2.0, 3.0)]).points
    assert points == ((0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 1.0), (4.0, 0.0))
