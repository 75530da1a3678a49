"""quire-engine with the demo model that calls tools: calls, results and answers, without a fake anywhere."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENT = EXAMPLES / "agent.py"


def tool(name: str, parameter: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Any = [
    tool("get_weather", "city", "Return the weather of a city."),
    tool("calculate", "expression", "Evaluate an arithmetic expression."),
]
# Neither city occurs in training.
WEATHER: Any = [{"role": "user", "content": "How is the weather in Bergen?"}]
TWO_CITIES: Any = [{"role": "user", "content": "How is the weather in Bergen and Malmo?"}]
PRODUCT: Any = [{"role": "user", "content": "How much is 12 times 34?"}]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with start_server("--model", str(EXAMPLES / "models" / "quire-demo-tools")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    made: openai.OpenAI = server.openai
    return made


def ask(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    """Return the choice of a greedy answer."""
    options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0, **fields}
    return client.chat.completions.create(messages=messages, **options).choices[0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize(
    ("messages", "calls"),
    [
        (WEATHER, [("get_weather", {"city": "Bergen"})]),
        (TWO_CITIES, [("get_weather", {"city": "Bergen"}), ("get_weather", {"city": "Malmo"})]),
        (PRODUCT, [("calculate", {"expression": "12 * 34"})]),
    ],
    ids=["one call", "two calls", "another tool"],
)
def test_a_question_gives_the_calls_it_needs(client: openai.OpenAI, messages: Any, calls: list[Any]) -> None:
    choice = ask(client, messages)
    assert (calls_of(choice.message), choice.finish_reason) == (calls, "tool_calls")
    assert not choice.message.content


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasons = []
    options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0, "tool_choice": "auto"}
    for chunk in client.chat.completions.create(messages=TWO_CITIES, **options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            names[delta.index] = names.get(delta.index, "") + (delta.function.name or "")
            arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
        assert not chunk.choices[0].delta.content
        reasons.append(chunk.choices[0].finish_reason)
    streamed = [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    assert streamed == calls_of(ask(client, TWO_CITIES).message) and len(streamed) == 2
    assert reasons[-1] == "tool_calls"


def test_the_model_writes_calls_in_hermes_form(client: openai.OpenAI) -> None:
    """With `tool_choice: none`, the server leaves the text as the model writes it."""
    choice = ask(client, WEATHER, tool_choice="none")
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
    assert (choice.message.content, choice.finish_reason) == (call, "stop")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_results_of_tools_become_the_answer(client: openai.OpenAI, streamed: bool) -> None:
    first = ask(client, TWO_CITIES).message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(first.tool_calls, ("snow, -3 °C", "windy"), strict=True)
    ]
    messages = [*TWO_CITIES, first.model_dump(exclude_none=True), *results]
    if streamed:
        options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0}
        chunks = list(client.chat.completions.create(messages=messages, **options, stream=True))
        text, reason = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), "stop"
        assert chunks[-1].choices[0].finish_reason == reason
    else:
        choice = ask(client, messages)
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("The weather in Bergen: snow, -3 °C. The weather in Malmo: windy.", "stop")


def test_a_required_call_is_the_right_one(client: openai.OpenAI) -> None:
    choice = ask(client, PRODUCT, tool_choice="required")
    assert (calls_of(choice.message), choice.finish_reason) == (
        [("calculate", {"expression": "12 * 34"})],
        "tool_calls",
    )


def test_a_named_function_gets_its_arguments(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, WEATHER, tool_choice=named)
    assert (calls_of(choice.message), choice.finish_reason) == ([("get_weather", {"city": "Bergen"})], "stop")


def test_a_question_that_no_tool_fits_gives_no_call(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "Order a pizza."}])
    assert (choice.message.content, choice.finish_reason) == ("I have no tool for that.", "stop")
    assert not choice.message.tool_calls


def run_agent(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(AGENT), *arguments], capture_output=True, text=True, timeout=60)


def test_the_agent_runs_the_tools_and_prints_the_answer(server: Any) -> None:
    options = ("--url", f"{server.address}/v1", "--model", "demo", "--api-key", server.key)
    done = run_agent(*options, "How is the weather in Paris and Oslo?", "How much is 12 times 34?")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "> How is the weather in Paris and Oslo?",
        '  get_weather({"city": "Paris"}) -> sunny, 21 °C',
        '  get_weather({"city": "Oslo"}) -> snow, -3 °C',
        "The weather in Paris: sunny, 21 °C. The weather in Oslo: snow, -3 °C.",
        "",
        "> How much is 12 times 34?",
        '  calculate({"expression": "12 * 34"}) -> 408',
        "12 * 34 = 408.",
        "",
    ]


def test_the_agent_says_what_is_wrong(server: Any, unused_tcp_port: int) -> None:
    address = f"http://127.0.0.1:{unused_tcp_port}/v1"
    done = run_agent("--url", address, "Hello!")
    assert (done.returncode, done.stderr) == (
        1,
        f"no server answers at {address}. Start one with `quire up -f examples/tools.yaml`, or name it by --url.\n",
    )
    done = run_agent("--url", f"{server.address}/v1", "--api-key", server.key, "--model", "other", "Hello!")
    assert done.returncode == 1 and "other" in done.stderr and "Traceback" not in done.stderr


def test_the_agent_refuses_an_expression_instead_of_cutting_it() -> None:
    run_tool = runpy.run_path(str(AGENT))["run_tool"]
    assert run_tool("calculate", json.dumps({"expression": "+".join(["1"] * 100)})) == "100"
    assert (
        run_tool("calculate", json.dumps({"expression": "+".join(["1"] * 101)})) == "Error: the expression is too long"
    )
