"""No request of a client causes a 5xx, ends the engine process or leaves anything running."""

import asyncio
import json
import random
import socket
import string
from collections.abc import Callable
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Serving = Callable[..., Any]

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# Values that are almost valid, so that some requests get far.
plausible: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 9),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 9),
    "logprobs": st.booleans() | st.integers(0, 5),
    "echo": st.booleans(),
    "prompt": st.text(max_size=9) | st.lists(st.integers(0, 300), max_size=5),
    "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)}), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.integers(-100, 100), max_size=2),
    "truncate_prompt_tokens": st.integers(1, 5),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "return_token_ids": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.text("ab", min_size=1), values, max_size=2),
}
bodies = st.fixed_dictionaries(
    {"model": st.just("demo")},
    optional={name: good | values for name, good in plausible.items()},
)


async def test_random_bodies_cause_no_server_error(serving: Serving) -> None:
    """One server, with hypothesis in a separate thread."""
    async with serving("okay é") as server:

        @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(
            body=bodies, path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        )
        def ask(body: dict[str, Any], path: str) -> None:
            response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert len(response.content) <= 4096 and set(response.json()) == {"error"}

        with httpx.Client(base_url=server.address, timeout=20) as client:
            await asyncio.to_thread(ask)
        assert server.queue.requests == 0 and server.context.lifecycle.in_flight == 0


async def test_random_bytes_do_not_crash_the_server(serving: Serving) -> None:
    async with serving("okay") as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        chance = random.Random(3)
        body = json.dumps({"model": "demo", "prompt": "x", "stream": True}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        whole = head % len(body) + body

        def spoil() -> None:
            for _ in range(150):
                message = bytearray(whole)
                for _ in range(chance.randrange(4)):
                    message[chance.randrange(len(message))] = ord(chance.choice(string.printable))
                message = message[: chance.randrange(len(message) + 1)]
                with socket.create_connection((host, int(port)), timeout=60) as connection:
                    connection.sendall(message)
                    if chance.random() < 0.5:
                        connection.shutdown(socket.SHUT_WR)
                        assert b"HTTP/1.1 5" not in connection.recv(4096)

        await asyncio.to_thread(spoil)
        assert (await server.complete()).status_code == 200
        lifecycle = server.context.lifecycle
        lifecycle.begin_drain()
        await asyncio.wait_for(lifecycle.drained(), 60)
        assert server.queue.requests == 0
