"""Anthropic's Messages API through the gateway: routing, keys, limits and errors."""

import pytest

from quire_gateway.limits import Charge
from quire_gateway.prompt import peek_request

LONG = "x" * 3000


def blocks(body: bytes) -> tuple[int, ...]:
    return peek_request(body, is_generating=True).blocks


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("tools", b'[{"name":"a"}]', b'[{"name":"b"}]'),
        ("system", b'"Be brief."', b'"Be long."'),
        ("instructions", b'"Be brief."', b'"Be long."'),
    ],
)
def test_system_and_tools_decide_prefix_affinity(field: str, one: bytes, other: bytes) -> None:
    def body(value: bytes) -> bytes:
        return b'{"model":"chat","messages":"%b","%b":%b}' % (LONG.encode(), field.encode(), value)

    assert blocks(body(one)) == blocks(body(one)) and len(blocks(body(one))) >= 10
    assert not set(blocks(body(one))) & set(blocks(body(other)))


@pytest.mark.parametrize("field", ["messages", "input", "prompt"])
def test_prompt_of_each_api_is_hashed(field: str) -> None:
    found = peek_request(b'{"model":"chat","%b":"%b"}' % (field.encode(), LONG.encode()), is_generating=True)
    assert len(found.blocks) == 3002 // 256 and found.num_bytes == 3002


async def test_gateway_errors_have_the_anthropic_format(gateway) -> None:
    await gateway.push()
    async with gateway.client.post(f"{gateway.url}/v1/messages", json={"model": "nope"}) as response:
        body = await response.json()
    assert response.status == 404 and body["type"] == "error"
    assert body["error"]["type"] == "not_found_error" and "does not exist" in body["error"]["message"]


async def test_x_api_key_is_a_key(start_gateway, replicas, tmp_path) -> None:
    (tmp_path / "keys").write_text("alice:alice-key-1\n")
    gateway = await start_gateway(api_key_file=tmp_path / "keys")
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])
    for key, status in (("alice-key-1", 200), ("wrong-key-1", 401), ("", 401)):
        async with gateway.client.post(
            f"{gateway.url}/v1/messages", json={"model": "chat"}, headers={"x-api-key": key}
        ) as response:
            assert response.status == status


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"id":"m","usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":7,'
         b'"output_tokens":3}}', 15),
        (b'{"id":"r","usage":{"input_tokens":5,"output_tokens":3,"total_tokens":8}}', 8),
        (b'{"content":[{"input":{"usage":{"input_tokens":900,"cache_creation_input_tokens":0,'
         b'"cache_read_input_tokens":7,"output_tokens":3}}}]}', 10),
    ],
)  # fmt: skip
def test_usage_is_read_at_the_end_of_a_message(answer: bytes, tokens: float) -> None:
    charge = Charge(prompt_tokens=10.0)
    charge.start_attempt()
    charge.read(answer)
    charge.end()
    assert charge.tokens() == tokens


async def test_broken_stream_ends_with_an_anthropic_error(gateway, chat) -> None:
    chat.break_after(b'event: message_start\ndata: {"type":"message_start"}\n\n')
    text = b""
    async with gateway.client.post(f"{gateway.url}/v1/messages", json={"model": "chat", "stream": True}) as response:
        async for part in response.content.iter_any():
            text += part
    assert b'event: error\ndata: {"type":"error","error":{' in text and b'"type":"api_error"' in text
