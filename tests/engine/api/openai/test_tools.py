"""Tools and reasoning in chats: what reaches the template, what clients get, streamed and not, and what is refused."""

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance
import openai
import pytest

from quire_engine.grammar.compiler import make_tokenizer
from quire_engine.grammar.spec import Vocabulary

Serving = Callable[..., Any]
BYTES_TOKENIZER = make_tokenizer(
    Vocabulary(
        tokens=[*(bytes([byte]) for byte in range(256)), b""], special_tokens={"<end>": 256}, eos_token_ids=(256,)
    )
)

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
THINKING = TEMPLATE + "{% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n{% endif %}"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
ASK: Any = [{"role": "user", "content": "Weather?"}]


async def streamed(server: Any, **fields: Any) -> list[Any]:
    stream = await server.openai.chat.completions.create(model="demo", messages=ASK, stream=True, **fields)
    return [chunk async for chunk in stream]


async def test_a_client_calls_a_tool_and_sends_its_result(serving: Serving) -> None:
    async with serving("Let me look. " + CALL, template=TEMPLATE) as server:
        create = server.openai.chat.completions.create
        choice = (await create(model="demo", messages=ASK, tools=[WEATHER])).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        server.engine.says = "It rains."
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        answer = await create(model="demo", messages=[*ASK, choice.message, result], tools=[WEATHER])
        assert answer.choices[0].message.content == "It rains." and answer.choices[0].finish_reason == "stop"
        prompt = server.context.tokenizer.decode(server.engine.streams[1].prompt)
        assert json.dumps(WEATHER) in prompt
        assert prompt.endswith("<user>Weather?<assistant>Let me look.get_weather(Paris)<tool>rain")


async def test_the_clients_stream_helper_collects_a_call(serving: Serving) -> None:
    async with serving("Let me look. " + CALL, template=TEMPLATE) as server:
        options: Any = {"model": "demo", "messages": ASK, "tools": [WEATHER]}
        async with server.openai.chat.completions.stream(**options) as stream:
            deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = (await stream.get_final_completion()).choices[0]
        assert "".join(delta.arguments_delta for delta in deltas) == '{"city": "Paris"}' and len(deltas) > 3
        assert final.finish_reason == "tool_calls" and final.message.content == "Let me look."
        assert final.message.tool_calls[0].function.name == "get_weather" and final.message.tool_calls[0].id


async def test_streamed_chunks_sum_up_to_the_whole_message(serving: Serving) -> None:
    async with serving("x " + CALL + TIME, template=TEMPLATE) as server:
        fields: dict[str, Any] = {
            "tools": [WEATHER],
            "n": 2,
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        }
        whole = await server.openai.chat.completions.create(model="demo", messages=ASK, **fields)
        choices = [chunk.choices[0] for chunk in await streamed(server, **fields)]
        for index in range(2):
            parts = [choice for choice in choices if choice.index == index]
            expected = whole.choices[index]
            calls: dict[int, list[str]] = {}
            for part in (call for choice in parts for call in choice.delta.tool_calls or []):
                calls.setdefault(part.index, [part.function.name, ""])[1] += part.function.arguments
            assert list(calls.values()) == [
                [call.function.name, call.function.arguments] for call in expected.message.tool_calls
            ]
            assert "".join(choice.delta.content or "" for choice in parts) == expected.message.content == "x"
            assert [choice.finish_reason for choice in parts if choice.finish_reason] == ["tool_calls"]
            tokens = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
            assert tokens == [entry.token for entry in expected.logprobs.content]
            assert [i for part in parts for i in getattr(part, "token_ids", None) or []] == expected.token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_only_first_call_is_returned_without_parallel_calls(serving: Serving, stream: bool) -> None:
    async with serving(CALL + TIME, template=TEMPLATE) as server:
        fields: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
        if stream:
            chunks = await streamed(server, **fields)
            indices = {call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []}
            assert indices == {0} and chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            choice = (await server.chat(**fields)).json()["choices"][0]
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


async def test_call_of_an_undeclared_tool_is_returned(serving: Serving) -> None:
    async with serving(TIME, template=TEMPLATE) as server:
        message = (await server.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        assert message["content"] is None and message["tool_calls"][0]["function"]["name"] == "get_time"


async def test_call_cut_by_max_tokens_has_finish_reason_length(serving: Serving) -> None:
    async with serving(CALL, template=TEMPLATE) as server:
        choice = (await server.chat(tools=[WEATHER], max_tokens=len(CALL) - 22)).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length" and '{"city": "Paris'.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_call_is_returned_as_text_without_tools(serving: Serving, fields: dict[str, Any]) -> None:
    async with serving(CALL, template=TEMPLATE) as server:
        choice = (await server.chat(**fields)).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert choice["finish_reason"] == "stop"


def call_in_history(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "y"}]


@pytest.mark.parametrize(
    ("fields", "place", "part"),
    [
        ({"messages": call_in_history('{"city": ')}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
        ({"messages": call_in_history("[1]")}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
        ({"messages": call_in_history("[" * 50_000)}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [WEATHER] * 1025}, "tools", "1024"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", '"required"'),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_tim"}}},
            "tool_choice",
            "'get_tim'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"functions": [WEATHER["function"]]}, "functions", "tools"),
    ],
)
async def test_invalid_tools_are_refused_with_the_field(
    serving: Serving, fields: dict[str, Any], place: str, part: str
) -> None:
    async with serving("ok", template=TEMPLATE) as server:
        response = await server.chat(**fields)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["message"].startswith(f"{place}: ") and part in error["message"]


async def test_arguments_in_the_history_may_be_empty(serving: Serving) -> None:
    async with serving("ok", template=TEMPLATE) as server:
        assert (await server.chat(messages=call_in_history(""))).status_code == 200


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "tools_not_supported"),
        ({"template": "{{ tools }}"}, "no_tool_call_parser"),
        ({"template": TEMPLATE, "tool_call_parser": "none"}, "no_tool_call_parser"),
    ],
)
async def test_tools_that_would_be_lost_are_refused(serving: Serving, options: dict[str, Any], code: str) -> None:
    async with serving("ok", **options) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai.chat.completions.create(model="demo", messages=ASK, tools=[WEATHER])
        assert caught.value.code == code and caught.value.param == "tools"


async def test_explicit_parser_works_with_an_unknown_template(serving: Serving) -> None:
    async with serving("[f(a=1)]", template="{{ tools }}", tool_call_parser="pythonic") as server:
        (call,) = (await server.chat(tools=[WEATHER])).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


async def test_ids_have_the_length_that_mistral_demands(serving: Serving) -> None:
    async with serving('[TOOL_CALLS]f{"a": 1}', template="{{ tools }} [TOOL_CALLS]") as server:
        (call,) = (await server.chat(tools=[WEATHER])).json()["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9 and call["id"].isalnum()


# --- calls that a grammar forces ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_tool_is_called_with_the_whole_answer(serving: Serving, stream: bool) -> None:
    async with serving('{"city": "Paris"}', template=THINKING) as server:
        fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": WEATHER | {"function": {"name": "get_weather"}}}
        if stream:
            chunks = [chunk.choices[0] for chunk in await streamed(server, **fields)]
            parts = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            called = (parts[0].function.name, "".join(part.function.arguments for part in parts))
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        else:
            choice = (await server.chat(**fields)).json()["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            called = (call["function"]["name"], call["function"]["arguments"])
            assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
        assert called == ("get_weather", '{"city": "Paris"}')
        assert server.engine.streams[0].params.grammar is not None


async def test_required_calls_are_a_json_array_for_every_model(serving: Serving) -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'
    time = {"type": "function", "function": {"name": "get_time"}}
    async with serving(text, template="{{ tools }}") as server:
        choice = (await server.chat(tools=[WEATHER, time], tool_choice="required")).json()["choices"][0]
        calls = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
        assert calls == [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert server.engine.streams[0].params.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [{"max_tokens": 9}, {"stop": ["name"]}], ids=["max_tokens", "stop"])
async def test_forced_call_that_is_cut_has_no_text(serving: Serving, cut: dict[str, Any], stream: bool) -> None:
    """An answer that ends within the envelope of a required call has neither content nor calls, on all routes."""
    tool: Any = WEATHER["function"]
    messages = {"tools": [{"name": tool["name"], "input_schema": tool["parameters"]}], "tool_choice": {"type": "any"}}
    responses = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    async with serving('[{"name": "get_weather", "parameters": {"city": "Paris"}}]', template=TEMPLATE) as server:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", **cut}),
            (
                "/v1/messages",
                {"messages": ASK, **messages, "max_tokens": cut.get("max_tokens", 99)}
                | ({"stop_sequences": cut["stop"]} if "stop" in cut else {}),
            ),
        ]
        if "max_tokens" in cut:
            bodies.append(("/v1/responses", {"input": "Weather?", **responses, "max_output_tokens": cut["max_tokens"]}))
        for path, body in bodies:
            response = await server.http.post(path, json={"model": "demo", "stream": stream, **body})
            assert response.status_code == 200, response.text
            written = re.findall(
                r'"(?:content|text|delta|output_text|arguments)":\s*"((?:[^"\\]|\\.)+)"', response.text
            )
            assert not written, response.text


async def test_forced_call_contradicts_another_constraint(serving: Serving) -> None:
    async with serving("{}", template=TEMPLATE) as server:
        fields = {"tools": [WEATHER], "tool_choice": "required", "guided_choice": ["yes", "no"]}
        response = await server.chat(**fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


async def test_a_format_of_the_text_does_not_concern_a_forced_call(serving: Serving) -> None:
    async with serving('[{"name": "get_weather", "parameters": {"city": "Paris"}}]', template=TEMPLATE) as server:
        fields = {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}
        choice = (await server.chat(**fields)).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert '"parameters"' in server.context.grammars.specs[0].text


async def test_constrained_answer_is_content_after_an_opened_reasoning(serving: Serving) -> None:
    async with serving('{"a": 1}', template=THINKING) as server:
        message = (await server.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


SKY = {"type": "json_schema", "json_schema": {"name": "sky", "schema": {"enum": ["rain", "sun"]}}}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('"rain"', True),
        (CALL, True),
        (f"{CALL}\n{CALL}", True),
        ('"snow"', False),
        (f'{CALL}"rain"', False),
        (CALL.replace("get_weather", "get_time"), False),
        ("Let me look.", False),
    ],
)
async def test_an_agent_with_tools_and_a_type_calls_or_answers(serving: Serving, text: str, accepted: bool) -> None:
    async with serving(text, template=TEMPLATE) as server:
        choice = (await server.chat(tools=[WEATHER], response_format=SKY)).json()["choices"][0]
        (stream,) = server.engine.streams
        assert follows(stream.params.grammar, text) == accepted
        if accepted:
            calls = [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
            assert calls == ["get_weather"] * text.count("get_weather")
            assert choice["message"]["content"] == (None if calls else text)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_grammar_allows_one_call_without_parallel_calls(serving: Serving) -> None:
    async with serving(CALL, template=TEMPLATE) as server:
        await server.chat(tools=[WEATHER], response_format=SKY, parallel_tool_calls=False)
        grammar = server.engine.streams[0].params.grammar
        assert follows(grammar, CALL) and not follows(grammar, f"{CALL}\n{CALL}")


async def test_required_call_with_deep_parameters_is_refused(serving: Serving) -> None:
    parameters: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        parameters = {"type": "object", "properties": {"a": parameters}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    async with serving("[]", template=TEMPLATE) as server:
        error = (await server.chat(tools=[tool], tool_choice="required")).json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "tools", "invalid_grammar")


async def test_with_tool_choice_none_a_type_is_the_only_answer(serving: Serving) -> None:
    async with serving('"sun"', template=TEMPLATE) as server:
        await server.chat(tools=[WEATHER], response_format=SKY, tool_choice="none")
        grammar = server.engine.streams[0].params.grammar
        assert follows(grammar, '"sun"') and not follows(grammar, CALL)


def follows(grammar: str | None, text: str) -> bool:
    """Return whether the text is a whole answer under the grammar, a token per byte."""
    assert grammar is not None
    matcher = llguidance.LLMatcher(BYTES_TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


# --- reasoning ---


async def test_reasoning_is_separate_from_content(serving: Serving) -> None:
    async with serving("I think so.</think>Yes.", template=THINKING) as server:
        message = (await server.chat()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("I think so.", "Yes.")
        assert message["reasoning"] == message["reasoning_content"]
        deltas = [chunk.choices[0].delta for chunk in await streamed(server)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I think so."
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I think so."
        assert "".join(delta.content or "" for delta in deltas) == "Yes."


async def test_reasoning_and_a_call_in_one_answer(serving: Serving) -> None:
    async with serving("Hm.</think>\n\n" + CALL, template=THINKING) as server:
        choice = (await server.chat(tools=[WEATHER])).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "Hm." and choice["message"]["content"] is None
        assert choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls"


async def test_thinking_that_is_disabled_leaves_all_text_content(serving: Serving) -> None:
    async with serving("Yes.", template=THINKING) as server:
        for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message = (await server.chat(**fields)).json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "Yes.", "refusal": None}


async def test_a_client_may_leave_reasoning_out(serving: Serving) -> None:
    async with serving("Hm.</think>Yes.", template=THINKING) as server:
        message = (await server.chat(include_reasoning=False)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
        deltas = [chunk.choices[0].delta for chunk in await streamed(server, extra_body={"include_reasoning": False})]
        assert all("reasoning" not in delta.to_dict() for delta in deltas)


async def test_reasoning_is_content_without_a_parser(serving: Serving) -> None:
    async with serving("Hm.</think>Yes.", template=THINKING, reasoning_parser="none") as server:
        assert (await server.chat()).json()["choices"][0]["message"]["content"] == "Hm.</think>Yes."


async def test_an_answer_cut_in_its_reasoning_has_no_content(serving: Serving) -> None:
    async with serving("Hm, and so on", template=THINKING) as server:
        choice = (await server.chat(max_tokens=2)).json()["choices"][0]
        assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "Hm"
        assert choice["finish_reason"] == "length"
