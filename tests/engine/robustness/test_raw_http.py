"""For any bytes the server answers or closes: no 5xx, no hang, small errors of one shape, nothing left running.

``QUIRE_HYPOTHESIS_EXAMPLES`` sets the number of mutated requests.
"""

import gzip
import json
import os
import random
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

MUTATIONS = int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "100"))
REQUEST: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
MAX_ERROR = 4096


@pytest.fixture(scope="module")
def server(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Yield a server, at whose end nothing may run, wait or hold blocks in the engine process that was started."""
    with start_server("--check-integrity", "--max-body-bytes", "1MiB", fake={"step_seconds": 0.002}) as made:
        pid = made.engine_pid()
        yield made
        made.assert_nothing_is_left()
        assert made.engine_pid() == pid and made.metric("quire_engine_restarts_total") == 0
        assert "Traceback" not in "".join(made.log), "".join(made.log)


def request_of(
    server: Any,
    body: bytes,
    *,
    path: str = "/v1/completions",
    media: str = "application/json",
    more: str = "",
    close: bool = True,
    method: str = "POST",
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.key}\r\ncontent-type: {media}\r\n"
    if "transfer-encoding" not in more:
        head += f"content-length: {len(body)}\r\n"
    if close:
        head += "connection: close\r\n"
    return f"{head}{more}\r\n".encode("latin-1") + body


def talk(server: Any, data: bytes, *, shut: bool = False) -> bytes:
    """Return all bytes until the server closes; a hang is a TimeoutError."""
    answer = b""
    with socket.create_connection(server.host_and_port, timeout=20) as connection:
        try:
            connection.sendall(data)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server may close before it has read everything
    return answer


def checked(answer: bytes) -> int:
    """Return the status of one answer, after a check of the shape of its error."""
    head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500, answer
    if status >= 400:
        (length,) = re.findall(rb"content-length: (\d+)", head)
        body = body[: int(length)]
        assert len(body) <= MAX_ERROR and b"application/json" in head, answer[:500]
        error = json.loads(body)
        assert set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["message"]
    return status


def body_with(**fields: Any) -> bytes:
    return json.dumps({**REQUEST, **fields}).encode()


DEEP = 5_000
BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "blank": (b" \n", 400),
    "not JSON": (b"model=demo", 400),
    "null": (b"null", 400),
    "a string": (b'"model"', 400),
    "an array": (b"[]", 400),
    "two objects": (b"{}{}", 400),
    "cut short": (body_with()[:-1], 400),
    "deep arrays": (b'{"model":' + b"[" * DEEP + b"]" * DEEP + b"}", 400),
    "deep objects": (b'{"model":' * DEEP + b"1" + b"}" * DEEP, 400),
    "deep variables": (b'{"chat_template_kwargs":' * 900 + b"1" + b"}" * 900, 400),
    "NaN": (b'{"model":"demo","prompt":"x","temperature":NaN}', 400),
    "infinity": (b'{"model":"demo","prompt":"x","temperature":1e999}', 400),
    "a huge integer": (b'{"model":"demo","prompt":"x","seed":' + b"9" * 100_000 + b"}", 400),
    "an integer beyond 64 bits": (b'{"model":"demo","prompt":"x","n":99999999999999999999}', 400),
    "a huge token id": (b'{"model":"demo","prompt":[99999999999999999999]}', 400),
    "a negative token id": (b'{"model":"demo","prompt":[-1]}', 400),
    "token ids in decimals": (b'{"model":"demo","prompt":[3.0, 4e0],"max_tokens":1}', 200),
    "a lone surrogate": (b'{"model":"demo","prompt":"\\ud800","max_tokens":1}', 200),
    "a pair of surrogates": (b'{"model":"demo","prompt":"\\ud83d\\ude00","max_tokens":1}', 200),
    "a surrogate as UTF-8": (b'{"model":"demo","prompt":"\xed\xa0\x80"}', 400),
    "overlong UTF-8": (b'{"model":"demo","prompt":"\xc0\xaf"}', 400),
    "Latin-1": ('{"model":"demo","prompt":"é"}'.encode("latin-1"), 400),
    "UTF-16": ('{"model":"demo","prompt":"é"}'.encode("utf-16"), 400),
    "a byte order mark": (b"\xef\xbb\xbf" + body_with(), 400),
    "a null character": (body_with(prompt="\0"), 200),
    "a field twice": (b'{"model":"demo","model":"none","prompt":"x"}', 404),
    "many unknown fields": (body_with(**{f"field{i}": i for i in range(10_000)}), 400),
    "a long unknown field": (body_with(**{"x" * 100_000: 1}), 400),
    "a long model name": (body_with(model="m" * 100_000), 404),
    "wide characters in an error": (body_with(model="𝔪" * 1000), 404),
    "many prompts": (body_with(prompt=["x"] * 5000), 400),
    "many empty prompts": (body_with(prompt=[""] * 5000), 400),
    "many stop strings": (body_with(stop=["x"] * 5000), 400),
    "too large": (body_with(prompt="x" * 2**20), 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_body_gets_its_status(server: Any, name: str) -> None:
    body, status = BODIES[name]
    assert checked(talk(server, request_of(server, body))) == status


PLAIN = json.dumps(REQUEST).encode()


@pytest.mark.parametrize(
    ("changes", "body", "status"),
    [
        ({"media": "application/json; charset=utf-8"}, PLAIN, 200),
        ({"media": "application/vnd.api+json"}, PLAIN, 200),
        ({"media": "application/json; charset=latin-1"}, PLAIN, 200),
        ({"media": "text/plain"}, PLAIN, 415),
        ({"media": "application/x-www-form-urlencoded"}, PLAIN, 415),
        ({"media": "multipart/form-data; boundary=x"}, PLAIN, 415),
        ({"media": ""}, PLAIN, 415),
        ({"media": "x" * 5000}, PLAIN, 415),
        ({"more": "content-encoding: gzip\r\n"}, gzip.compress(PLAIN), 415),
        ({"more": "content-encoding: deflate\r\n"}, zlib.compress(PLAIN), 415),
        ({"more": "content-encoding: br\r\n"}, PLAIN, 415),
        ({"more": "content-encoding: identity\r\n"}, PLAIN, 200),
        ({"more": "expect: 100-continue\r\n"}, b"", 400),
        ({"more": "transfer-encoding: chunked\r\n"}, b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN), 200),
        ({"more": "transfer-encoding: chunked\r\n"}, b"zz\r\n", 400),
        ({"more": "transfer-encoding: chunked, gzip\r\n"}, b"0\r\n\r\n", 400),
        ({"more": "content-length: 5\r\n"}, PLAIN, 400),
        ({"more": "accept: image/png\r\n"}, PLAIN, 200),
        ({"path": "/" + "x" * 70_000}, PLAIN, 431),
        ({"path": "/v1/" + "a/" * 3000}, PLAIN, 404),
        ({"path": "/v1/%00%ff%2e%2e/..//completions"}, PLAIN, 404),
        ({"path": "/v1/completions?" + "x=1&" * 2000}, PLAIN, 200),
        ({"path": "/v1/models/" + "%F0%9F%98%80" * 500, "method": "GET"}, b"", 404),
        ({"more": f"x-long: {'x' * 70_000}\r\n"}, PLAIN, 431),
        ({"more": "x-one: 1\r\n" * 9000}, PLAIN, 431),
        ({"more": "x-one: 1\r\n" * 500}, PLAIN, 200),
        ({"more": "x-request-id: \x01\r\n"}, PLAIN, 400),
        ({"more": f"x-request-id: {'é' * 300}\r\n"}, PLAIN, 200),
        ({"method": "BREW"}, PLAIN, 400),
        ({"method": "PUT"}, PLAIN, 405),
    ],
)
def test_malformed_headers_get_their_status(server: Any, changes: dict[str, str], body: bytes, status: int) -> None:
    assert checked(talk(server, request_of(server, body, **changes))) == status


def test_a_body_beyond_its_limit_is_refused_before_it_is_read(server: Any) -> None:
    announced = request_of(server, b"", more="").replace(b"content-length: 0", b"content-length: 9999999999")
    assert checked(talk(server, announced)) == 413
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    assert checked(talk(server, request_of(server, chunk * 40, more="transfer-encoding: chunked\r\n"))) == 413


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    one = request_of(server, PLAIN, close=False)
    wrong = request_of(server, b"{}", close=False)
    answer = talk(server, one + wrong + one + request_of(server, PLAIN))
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 400, 200, 200]


def test_garbage_after_a_request_ends_no_stream_successfully(server: Any) -> None:
    body = body_with(stream=True, max_tokens=2000)
    answer = talk(server, request_of(server, body, close=False) + b"\0garbage\r\n\r\n")
    assert b"[DONE]" not in answer


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_protocol_upgrade_offer_is_ignored(server: Any, protocol: str) -> None:
    """Java's client and ``curl --http2`` offer one with every request."""
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = request_of(server, PLAIN, more=offer, close=False) + request_of(server, PLAIN)
    answer = talk(server, data)
    assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200]


def test_half_closed_connection_is_treated_as_disconnect(server: Any) -> None:
    """Closing and half-closing cannot be distinguished, and nothing is generated for a client that left."""
    whole = request_of(server, body_with(max_tokens=3000), close=False)
    for length in (0, 10, 100, len(whole) - 1, len(whole)):
        assert talk(server, whole[:length], shut=True) == b""
    server.assert_nothing_is_left()


def test_disconnects_at_any_moment_leave_no_requests(server: Any) -> None:
    chance = random.Random(11)
    whole = request_of(server, body_with(stream=True, max_tokens=3000), close=False)

    def come_and_go(number: int) -> None:
        with socket.create_connection(server.host_and_port, timeout=20) as connection:
            if number % 3 == 0:
                connection.sendall(whole[: chance.randrange(len(whole))])
            else:
                connection.sendall(whole)
                for _ in range(chance.randrange(4)):
                    connection.recv(200)
            if number % 2:  # a reset instead of an end
                linger = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(100)))
    server.assert_nothing_is_left()


def test_mutated_requests_cause_no_server_error(server: Any) -> None:
    chance = random.Random(7)
    templates = [
        request_of(server, body_with(stream=True, stop=["a"], logprobs=2)),
        request_of(server, json.dumps({"model": "demo", "messages": [{"role": "user", "content": "é"}]}).encode(),
                   path="/v1/chat/completions"),
        request_of(server, b'{"prompt": "x"}', path="/tokenize"),
        request_of(server, b'{"tokens": [1, 2]}', path="/detokenize"),
    ]  # fmt: skip

    def mutated() -> bytes:
        message = bytearray(chance.choice(templates))
        for _ in range(chance.randrange(1, 5)):
            place = chance.randrange(len(message))
            match chance.randrange(4):
                case 0:
                    message[place] = chance.randrange(256)
                case 1:
                    del message[place : place + chance.randrange(1, 9)]
                case 2:
                    message[place:place] = message[: chance.randrange(1, 60)]
                case 3:
                    message[place:place] = chance.choice([b"{", b"]", b'"', b"\\u", b"1e9", b"\r\n", b"\0", b"null,"])
        return bytes(message)

    def ask(message: bytes) -> None:
        answer = talk(server, message, shut=True)
        assert b"HTTP/1.1 5" not in answer, (message, answer)
        if answer.startswith(b"HTTP/1.1 4"):
            checked(answer)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [mutated() for _ in range(MUTATIONS)]))
