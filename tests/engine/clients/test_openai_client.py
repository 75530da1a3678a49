"""OpenAI's own Python client against the demo model, unchanged: its calls, parameters and exceptions."""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from openai.resources import Completions
from openai.resources.chat import Completions as ChatCompletions

from quire_engine.api.chat import ChatCompletionRequest
from quire_engine.api.schemas import UNSUPPORTED, CompletionRequest

ASK: Any = [{"role": "user", "content": "What is a list?"}]
START = "The list"
STILL: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
"""Parameters with which the answer is always the same and has exactly max_tokens."""


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = demo_server.openai
    return made


@pytest.fixture
def asynchronous(demo_server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{demo_server.address}/v1", api_key=demo_server.key, max_retries=0)


# --- models ---


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "quire"


# --- chat ---


def test_the_clients_stream_helper_puts_an_answer_together(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 20, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text is not None and len(text) > 20
    stop = text[12:16]
    with client.chat.completions.stream(**options, stop=stop, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == text[: text.index(stop)]
    assert final.choices[0].finish_reason == "stop" and final.usage is not None and final.usage.completion_tokens > 0


def test_assistant_message_can_be_sent_back_unchanged(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "max_completion_tokens": 5}
    message = client.chat.completions.create(messages=ASK, **options).choices[0].message
    for answer in (message, message.model_dump(), message.to_dict()):
        follow_up = [*ASK, answer, {"role": "user", "content": "And a tuple?"}]
        assert client.chat.completions.create(messages=follow_up, **options).choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("create", "schema"), [(ChatCompletions.create, ChatCompletionRequest), (Completions.create, CompletionRequest)]
)
def test_every_client_argument_is_accepted_or_rejected_by_name(create: Callable[..., Any], schema: Any) -> None:
    """An argument is accepted or rejected with a reason, but never an unknown field."""
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(create).parameters) - transport - set(schema.model_fields) - set(UNSUPPORTED) == set()


async def test_the_asynchronous_client_streams_and_does_not(asynchronous: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 8, **STILL}
    async with asynchronous as client:
        whole = (await client.chat.completions.create(**options)).choices[0].message.content
        chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


# --- errors and retries ---


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"temperature": 7}, openai.BadRequestError, "temperature: should be less than or equal to 2"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError, "context of 4096 tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean temperature"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "'gpt-4o' .* demo"),
        ({"extra_headers": {"authorization": "Bearer wrong-key-1"}}, openai.AuthenticationError, "API key"),
    ],
)
def test_invalid_requests_raise_the_clients_error_classes(
    client: openai.OpenAI, fields: Any, kind: type[openai.APIStatusError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": ASK, **fields})
    assert caught.value.request_id


def test_client_retries_when_the_queue_is_full(
    start_server: Callable[..., AbstractContextManager[Any]],
) -> None:
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1")
    options: dict[str, Any] = {"model": "demo", "prompt": START, "extra_body": {"ignore_eos": True}}
    with start_server(*flags, fake={"step_seconds": 0.01}) as server, ThreadPoolExecutor(2) as pool:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.key, max_retries=0)
        for _ in range(3):  # so that the drain rate of the queue is known
            client.completions.create(**options, max_tokens=1)
        with client, client.completions.create(**options, max_tokens=3000, stream=True) as running:
            next(iter(running))
            waiting = pool.submit(client.completions.create, **options, max_tokens=2)
            server.until(lambda: server.metric("vllm:num_requests_waiting") == 1)
            with pytest.raises(openai.RateLimitError, match="1 sequences with 3 prompt tokens") as caught:
                client.completions.create(**options, max_tokens=1)
            assert caught.value.response.headers["retry-after"] == "1"
            patient = pool.submit(client.with_options(max_retries=4).completions.create, **options, max_tokens=3)
            server.until(lambda: server.metric("quire_rejected_requests_total", reason="queue_full") == 2)
            running.close()
            assert [answer.result(20).usage.completion_tokens for answer in (waiting, patient)] == [2, 3]


class Person(pydantic.BaseModel):
    """A form of answers."""

    name: Annotated[str, pydantic.Field(max_length=8)]
    age: Annotated[int, pydantic.Field(ge=0, le=120)]
    pets: Annotated[list[Literal["cat", "dog"]], pydantic.Field(max_length=2)]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_parsed_into_a_model(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 200, "seed": 3}
    if stream:
        with client.beta.chat.completions.stream(**options, response_format=Person) as events:
            parsed = events.get_final_completion().choices[0].message.parsed
    else:
        parsed = client.beta.chat.completions.parse(**options, response_format=Person).choices[0].message.parsed
    assert isinstance(parsed, Person) and 0 <= parsed.age <= 120 and len(parsed.name) <= 8
