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


async def test_models_are_listed_to_the_asynchronous_client(asynchronous: openai.AsyncOpenAI) -> None:
    async with asynchronous as client:
        assert [model.id async for model in client.models.list()] == ["demo"]


# --- chat ---


def test_n_answers_with_one_prompt_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=ASK, n=3, max_completion_tokens=6, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None and answer.usage.completion_tokens <= 18
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_with_n_choices_equals_the_whole_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "n": 2, "max_completion_tokens": 12, "seed": 5}
    whole = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


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


def test_usage_is_in_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="demo",
        messages=ASK,
        max_completion_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
        **STILL,
    )
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == 7


def test_streamed_logprobs_equal_those_of_the_whole_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 6, **STILL}
    options |= {"logprobs": True, "top_logprobs": 2}
    logprobs = client.chat.completions.create(**options).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in logprobs.content], abs=0.05
    )


def test_assistant_message_can_be_sent_back_unchanged(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "max_completion_tokens": 5}
    message = client.chat.completions.create(messages=ASK, **options).choices[0].message
    for answer in (message, message.model_dump(), message.to_dict()):
        follow_up = [*ASK, answer, {"role": "user", "content": "And a tuple?"}]
        assert client.chat.completions.create(messages=follow_up, **options).choices[0].message.role == "assistant"


def test_fields_without_an_effect_are_accepted(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 8, **STILL}
    plain = client.chat.completions.create(**options)
    adorned = client.chat.completions.create(
        **options,
        metadata={"project": "x"},
        store=True,
        user="client-7",
        safety_identifier="s",
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        modalities=["text"],
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        verbosity="medium",
        logit_bias={},
        stop=None,
    )
    assert adorned.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("create", "schema"), [(ChatCompletions.create, ChatCompletionRequest), (Completions.create, CompletionRequest)]
)
def test_every_client_argument_is_accepted_or_rejected_by_name(create: Callable[..., Any], schema: Any) -> None:
    """An argument is accepted or rejected with a reason, but never an unknown field."""
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(create).parameters) - transport - set(schema.model_fields) - set(UNSUPPORTED) == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {"search_context_size": "low"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(client: openai.OpenAI, fields: Any) -> None:
    (name,) = fields
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.chat.completions.create(model="demo", messages=ASK, **fields)
    assert caught.value.param == name


async def test_the_asynchronous_client_streams_and_does_not(asynchronous: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 8, **STILL}
    async with asynchronous as client:
        whole = (await client.chat.completions.create(**options)).choices[0].message.content
        chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


# --- completions ---


def test_completions_accept_every_prompt_form(client: openai.OpenAI, demo_server: Any) -> None:
    ids = demo_server.http.post("/tokenize", json={"prompt": START}).json()["tokens"]
    options: dict[str, Any] = {"model": "demo", "max_tokens": 5, **STILL}
    alone = client.completions.create(prompt=START, **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == alone
    for prompts in ([START, "A tuple"], [ids, ids]):
        answer = client.completions.create(prompt=prompts, n=2, **options)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.choices[0].text == alone
        assert answer.usage is not None and answer.usage.completion_tokens == 20


def test_streamed_completion_equals_the_whole_completion(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": START, "max_tokens": 9, "echo": True, **STILL}
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.text and whole.text.startswith(START)
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


def test_a_completions_logprobs_are_parallel_arrays(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=START, max_tokens=4, logprobs=2, **STILL)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4


def test_a_suffix_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="demo", prompt=START, suffix=" the end.")


# --- headers, errors, retries ---


def test_raw_responses_carry_the_requests_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=ASK, max_completion_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7" and raw.parse().id == "chatcmpl-mine-7"
    with client.completions.with_streaming_response.create(model="demo", prompt=START, max_tokens=2) as response:
        assert response.headers["content-type"] == "application/json" and b"text_completion" in response.read()


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


def test_a_wrong_path_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/moderations"):
        client.moderations.create(model="demo", input="x")


def test_embeddings_of_a_model_that_generates_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--runner pooling"):
        client.embeddings.create(model="demo", input="x")


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


def test_client_timeout_cancels_the_request_on_the_server(
    start_server: Callable[..., AbstractContextManager[Any]],
) -> None:
    with start_server(fake={"step_seconds": 0.01}) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.key, max_retries=0, timeout=0.3)
        with client, pytest.raises(openai.APITimeoutError):
            client.completions.create(model="demo", prompt=START, max_tokens=3000, extra_body={"ignore_eos": True})
        server.assert_nothing_is_left()


def test_draining_server_and_unreachable_server_raise_errors(
    start_server: Callable[..., AbstractContextManager[Any]],
) -> None:
    with start_server(fake={}) as server:
        options: dict[str, Any] = {"base_url": f"{server.address}/v1", "api_key": server.key, "max_retries": 0}
        server.http.post("/admin/drain")
        with openai.OpenAI(**options) as client, pytest.raises(openai.InternalServerError, match="draining") as caught:
            client.completions.create(model="demo", prompt=START)
        assert caught.value.status_code == 503 and int(caught.value.response.headers["retry-after"]) > 0
    with openai.OpenAI(**options) as client, pytest.raises(openai.APIConnectionError):
        client.completions.create(model="demo", prompt=START)


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


def test_guided_choice_returns_one_of_the_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=ASK, n=4, extra_body={"structured_outputs": {"choice": ["tea", "coffee"]}}
    )
    assert {choice.message.content for choice in answer.choices} <= {"tea", "coffee"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
