#!/usr/bin/env python3
"""A small agent: it sends a question and some tools to a server, runs the tools that the model calls, and prints all.

    quire up -f examples/tools.yaml                                        in one terminal
    python examples/agent.py "How is the weather in Paris and Oslo?"       in another one

It works with every server of OpenAI's chat completions whose model calls tools. It needs `pip install openai`.
"""

import argparse
import ast
import inspect
import json
import operator
import sys
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pydoc_data.topics import topics
from typing import Any

import openai

_EXAMPLES = (
    "How is the weather in Paris and Oslo?",
    "What time is it in Tokyo?",
    "How much is 12 times 34?",
    "Search for lambda.",
    "Order a pizza.",
)
_WEATHER = {
    "Berlin": "cloudy, 17 °C",
    "London": "light rain, 14 °C",
    "Madrid": "clear, 29 °C",
    "New York": "windy, 8 °C",
    "Oslo": "snow, -3 °C",
    "Paris": "sunny, 21 °C",
    "Tokyo": "drizzle, 18 °C",
}
_OPERATIONS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class ToolError(Exception):
    """A tool cannot do what a call wants. The model gets the reason."""


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    # An agent of your own asks a weather service here.
    if city not in _WEATHER:
        raise ToolError("city not found")
    return _WEATHER[city]


def get_time(city: str) -> str:
    """Return the time in a city."""
    name = city.replace(" ", "_")
    zone = next((zone for zone in sorted(zoneinfo.available_timezones()) if zone.rpartition("/")[2] == name), None)
    if zone is None:
        raise ToolError("city not found")
    return f"{datetime.now(zoneinfo.ZoneInfo(zone)):%H:%M}"


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > 200:
        raise ToolError("the expression is too long")
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):.10g}"
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ToolError("invalid input") from error
    except ArithmeticError as error:
        raise ToolError(str(error)) from error


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def search(query: str) -> str:
    """Find pages about a subject."""
    # The pages are Python's own help texts.
    words = query.lower().split()
    return f"{sum(all(word in text.lower() for word in words) for text in topics.values())} pages"


TOOLS: Mapping[str, Callable[..., str]] = {tool.__name__: tool for tool in (get_weather, get_time, calculate, search)}


def declaration(tool: Callable[..., str]) -> dict[str, Any]:
    """Return the tool as chat completions declare it. All of its parameters are strings."""
    names = list(inspect.signature(tool).parameters)
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    return {
        "type": "function",
        "function": {"name": tool.__name__, "description": inspect.getdoc(tool), "parameters": schema},
    }


def run_tool(name: str, arguments: str) -> str:
    """Return the result of a call, or its error as text for the model."""
    try:
        if name not in TOOLS:
            raise ToolError(f"unknown tool {name}")
        values: Any = json.loads(arguments)
        if not all(isinstance(value, str) for value in values.values()):
            raise ToolError("arguments must be strings")
        return TOOLS[name](**values)
    except (AttributeError, TypeError, ValueError):
        return "Error: invalid input"
    except ToolError as error:
        return f"Error: {error}"


def answer(client: openai.OpenAI, model: str, messages: list[Any], rounds: int) -> str | None:
    """Return the model's answer after all of its calls, or None if it still calls tools in the last round.

    The messages get the calls, their results and the answer, so that a next question can follow.
    """
    tools: Any = [declaration(tool) for tool in TOOLS.values()]
    for _ in range(rounds):
        completion = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = run_tool(call.function.name, call.function.arguments)
            print(f"  {call.function.name}({call.function.arguments}) -> {result}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    client = openai.OpenAI(base_url=given.url, api_key=given.api_key, max_retries=0)
    try:
        for question in given.questions if "questions" in given else _EXAMPLES:
            messages = [{"role": "user", "content": question}]
            print(f"> {question}", flush=True)
            found = answer(client, given.model, messages, given.rounds)
            if found is None:
                print(f"the model still calls tools after {given.rounds} rounds; see --rounds", file=sys.stderr)
                return 1
            print(f"{found}\n", flush=True)
    except openai.APIConnectionError:
        print(
            f"no server answers at {given.url}. Start one with `quire up -f examples/tools.yaml`, or name it by --url.",
            file=sys.stderr,
        )
        return 1
    except openai.APIStatusError as error:
        print(f"the server at {given.url} refuses the request: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent.py",
        description="Ask questions of a model that calls tools, and run the tools here: "
        "get_weather (example data), get_time, calculate, and search (in Python's help texts).",
        epilog="Start a server first: quire up -f examples/tools.yaml",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "questions",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="QUESTION",
        help="a question, which begins a chat of its own (default: five examples)",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="address of the API")
    parser.add_argument("--model", default="tools", help="name of the model")
    parser.add_argument("--api-key", default="none", help="key of the API, if it needs one")
    parser.add_argument("--rounds", type=_positive, default=5, help="most requests per question")
    return parser


if __name__ == "__main__":
    sys.exit(main())
