"""OpenAI's own client through the gateway."""

import openai
import pytest
from aiohttp import web


def sse(*events: str) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode()


CHUNK = '{{"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "chat", "choices": [{}]}}'


def chunk(text: str) -> str:
    return CHUNK.format(f'{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": null}}')


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        yield client


async def test_models_chat_and_streams(gateway, replicas, client):
    chat = await replicas("chat-0")

    async def answer(request):
        if chat.bodies[-1].get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(sse(chunk("Hel"), chunk("lo"), "[DONE]"))
            return response
        message = {"role": "assistant", "content": "Hello"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "chat", "choices": choices}
        )

    chat.behaviour = answer
    await gateway.push(chat=[chat.endpoint()])
    messages = [{"role": "user", "content": "hi"}]

    assert [model.id async for model in client.models.list()] == ["chat"]
    reply = await client.chat.completions.create(model="chat", messages=messages)
    assert reply.choices[0].message.content == "Hello"
    stream = await client.chat.completions.create(model="chat", messages=messages, stream=True)
    assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "Hello"


async def test_errors_raise_the_clients_error_classes(gateway, client):
    await gateway.push()
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.completions.create(model="nope", prompt="x")


async def test_broken_stream_raises_in_the_client(gateway, replicas, client):
    chat = await replicas("chat-0")
    chat.break_after(sse(chunk("Hel")) + b'data: {"id"')
    await gateway.push(chat=[chat.endpoint()])

    stream = await client.chat.completions.create(model="chat", messages=[], stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="replica died"):
        async for part in stream:
            seen.append(part.choices[0].delta.content)
    assert seen == ["Hel"]
