"""OpenAI's Responses API: items and events of answers, and what is refused."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from quire_engine.errors import Unavailable

Serving = Callable[..., Any]

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "<answer>{% if reasoning_effort %}<think>\n{% else %}<think>\n\n</think>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def create(server: Any, **fields: Any) -> Any:
    return await server.openai.responses.create(**{"model": "demo", "input": "Weather?", **fields})


def prompt(server: Any, number: int = -1) -> str:
    text: str = server.context.tokenizer.decode(server.engine.streams[number].prompt)
    return text


def without_ids(response: Any) -> dict[str, Any]:
    made: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        made.pop(name)
    for item in made["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return made


@pytest.mark.parametrize(
    ("says", "fields", "kinds", "status"),
    [
        ("Hello", {}, ["message"], "completed"),
        ("", {}, ["message"], "completed"),
        ("Hello", {"max_output_tokens": 2}, ["message"], "incomplete"),
        ("Hm.</think>Hello", {"reasoning": {"effort": "low"}}, ["reasoning", "message"], "completed"),
        ("Hm.</think>" + CALL, {"reasoning": {"effort": "low"}, "tools": [WEATHER]}, ["reasoning", "function_call"],
         "completed"),
        ("Look: " + CALL + CALL, {"tools": [WEATHER]}, ["message", "function_call", "function_call"], "completed"),
        (CALL + CALL, {"tools": [WEATHER], "parallel_tool_calls": False}, ["function_call"], "completed"),
    ],
)  # fmt: skip
async def test_a_streamed_response_is_the_whole_one(
    serving: Serving, says: str, fields: dict[str, Any], kinds: list[str], status: str
) -> None:
    async with serving(says, template=TEMPLATE) as server:
        whole = await create(server, **fields)
        assert [item.type for item in whole.output] == kinds and whole.status == status
        events = [event async for event in await create(server, stream=True, **fields)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == f"response.{status}"
        assert without_ids(events[-1].response) == without_ids(whole)
        done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
        assert done == [item.to_dict() for item in events[-1].response.output]
        texts: dict[str, str] = {}
        for event in events:
            if event.type.endswith(".delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        for item in events[-1].response.output:
            text = item.arguments if item.type == "function_call" else item.content[0].text
            assert texts.get(item.id, "") == text


async def test_text_events_have_the_openai_order(serving: Serving) -> None:
    async with serving("Hi", template=TEMPLATE) as server:
        events = [event.type async for event in await create(server, stream=True)]
    assert events == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_the_clients_stream_helper_collects_a_response(serving: Serving) -> None:
    async with serving("Look: " + CALL, template=TEMPLATE) as server:
        async with server.openai.responses.stream(model="demo", input="Weather?", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds.count("response.function_call_arguments.delta") > 3
        assert final.output_text == "Look:" and json.loads(final.output[1].arguments) == {"city": "Paris"}


async def test_items_of_an_answer_continue_the_conversation(serving: Serving) -> None:
    async with serving("Look: " + CALL, template=TEMPLATE) as server:
        first = await create(server, tools=[WEATHER], instructions="Be brief.")
        assert prompt(server).endswith("<system>Be brief.<user>Weather?<answer><think>\n\n</think>")
        call = first.output[1]
        server.engine.says = "Rain."
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items = [{"role": "user", "content": "Weather?"}, *[item.to_dict() for item in first.output], result]
        second = await create(server, tools=[WEATHER], input=items)
        assert second.output_text == "Rain."
        expected = "<user>Weather?<assistant>Look:get_weather(Paris)<tool>rain<answer><think>\n\n</think>"
        assert prompt(server).endswith(expected) and "Be brief." not in prompt(server)


async def test_reasoning_is_one_message_with_its_answer(serving: Serving) -> None:
    async with serving("Hm.</think>Hello", template=TEMPLATE) as server:
        first = await create(server, reasoning={"effort": "low", "summary": "auto"})
        assert first.output[0].content[0].text == "Hm."
        items = [item.to_dict() for item in first.output]
        await create(
            server, input=[{"role": "user", "content": "Weather?"}, *items, {"role": "user", "content": "And?"}]
        )
        assert "<user>Weather?<assistant>Hm.Hello<user>And?" in prompt(server)


async def test_a_schema_constrains_the_answer(serving: Serving) -> None:
    async with serving('{"a":1}') as server:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        answer = await create(server, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
        assert answer.output_text == '{"a":1}' and "properties" in server.context.grammars.specs[0].text


# --- what is not stored ---


@pytest.mark.parametrize("store", [True, False, None])
async def test_no_response_is_stored(serving: Serving, store: bool | None) -> None:
    async with serving("Hello") as server:
        made = await create(server, store=store, background=False, previous_response_id=None)
        assert (made.store, made.background, made.previous_response_id) == (False, False, None)
        known = server.openai.responses
        for attempt in (
            known.retrieve(made.id),
            known.delete(made.id),
            known.cancel(made.id),
            known.input_items.list(made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="send the whole conversation in input") as refused:
                await attempt
            assert refused.value.code == "responses_not_stored"


@pytest.mark.parametrize("fields", [
    {"previous_response_id": "resp_1"},
    {"conversation": "conv_1"},
    {"background": True},
    {"background": True, "stream": True},
    {"background": True, "store": False},
], ids=str)  # fmt: skip
async def test_continuing_by_id_is_refused_by_name(serving: Serving, fields: dict[str, Any]) -> None:
    async with serving("Hello") as server:
        with pytest.raises(openai.BadRequestError, match="send the whole conversation in input") as refused:
            await create(server, **fields)
        assert refused.value.param == next(iter(fields)) and server.engine.streams == []


# --- errors ---


async def test_a_failed_stream_ends_with_failed_and_error(serving: Serving) -> None:
    async with serving() as server:
        asking = asyncio.create_task(create(server, stream=True))
        stream = await server.engine.stream()
        stream.draw([65])
        events = []
        stream.breaks(Unavailable("the engine stopped", code="engine_stopped"))
        with pytest.raises((openai.APIError, Exception)):
            async for event in await asking:
                events.append(event)
        assert [event.type for event in events[-2:]] == ["response.failed", "error"]
        assert events[-2].response.error.message == "the engine stopped"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "'input_image'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "[1]"}]}, "arguments"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice: 'x' is not one of"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs are not supported with a model that"),
        ({"include": ["other"]}, "'other' is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"input": "x" * 600}, "input"),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused_by_name(serving: Serving, fields: dict[str, Any], named: str) -> None:
    async with serving("Hello", template=TEMPLATE) as server:
        answer = await server.http.post("/v1/responses", json={"model": "demo", "input": "Hi", **fields})
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]


LOGPROBS: Any = {"include": ["message.output_text.logprobs"]}


async def test_text_logprobs_are_those_of_its_tokens(serving: Serving) -> None:
    async with serving("Hello") as server:
        whole = (await create(server, **LOGPROBS, top_logprobs=2)).output[0].content[0]
        assert "".join(each.token for each in whole.logprobs).startswith(whole.text)
        assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in whole.logprobs)
        assert bytes(whole.logprobs[0].bytes) == b"H"
        events = [event async for event in await create(server, **LOGPROBS, top_logprobs=2, stream=True)]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        for event in deltas:
            assert "".join(each.token for each in event.logprobs) == event.delta
            assert all(len(each.top_logprobs) == 2 for each in event.logprobs)
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [each.token for each in done.logprobs] == [each.token for each in whole.logprobs]
        assert events[-1].response.output[0].content[0].logprobs == whole.logprobs
        assert (await create(server, **LOGPROBS)).output[0].content[0].logprobs[0].top_logprobs == []
        assert (await create(server)).output[0].content[0].logprobs == []


async def test_logprobs_of_calls_are_refused(serving: Serving) -> None:
    async with serving("Hello") as server:
        answer = await server.http.post(
            "/v1/responses", json={"model": "demo", "input": "Hi", "tools": [WEATHER], **LOGPROBS}
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "include"
