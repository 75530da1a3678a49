#!/usr/bin/env python3
"""Compare quire and vLLM on requests that must follow JSON schemas: tokens per second, and how many answers are valid.

    python -m benchmarks.grammars.compare_servers [--sequences 16] [--answers 48] [--runs 3] [--schemas FOLDER]

Both serve the same model, one at a time and in turns, and get the same requests (temperature 1, a seed each), with a
schema (``response_format``) and without. The ratio of a server is that of its rates with and without schemas. The demo
model knows nothing of JSON, so the grammar alone makes an answer valid; an answer that reached the limit of tokens is
cut and counts as such. vLLM is installed by ``make peers``.
"""

import asyncio
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs

from benchmarks.grammars.random_answers import finite
from benchmarks.grammars.schemas import read_schemas
from benchmarks.report import DEMO_MODEL, at_least_one, interrupt_on_terminate
from benchmarks.serving.comparison.paired import Body, Result, in_turns, peers_parser, report, seconds_to_answer
from benchmarks.serving.comparison.started import start_each


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 24}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 130}, city=_TEXT),
    _object(tool={"enum": ["search", "calculate", "translate"]}, arguments=_object(query=_TEXT, limit=_COUNT)),
    _object(tags={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 6}),
    _object(
        point=_object(x={"type": "number"}, y={"type": "number"}), label={"type": ["string", "null"], "maxLength": 9}
    ),
    _object(answer={"type": "boolean"}, reason={"type": "string", "maxLength": 60}),
    _object(date={"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][0-9]$"}, amount=_COUNT),
    _object(rows={"type": "array", "items": _object(id=_COUNT, text=_TEXT), "minItems": 1, "maxItems": 3}),
    _object(value={"anyOf": [{"type": "integer", "maximum": 99, "minimum": -99}, {"enum": ["unknown", "none"]}]}),
)
"""Schemas as clients send them, if no folder is given."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The answers of one server to one round of requests."""

    tokens: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def send(url: str, schemas: list[Any], *, sequences: int, answers: int, constrained: bool, limit: int) -> Outcome:
    """Return what a server answers to so many requests of so many clients."""
    outcome = Outcome()

    def answered(body: Body, response: aiohttp.ClientResponse, found: Any) -> None:
        if response.status != 200:
            outcome.counts[f"status {response.status}"] += 1
            return
        outcome.tokens += found["usage"]["completion_tokens"]
        if constrained:
            schema = body["response_format"]["json_schema"]["schema"]
            outcome.counts[_judged(found["choices"][0], schema)] += 1

    requests = [
        _request(number, schema if constrained else None, limit=limit)
        for number, schema in enumerate(islice(cycle(schemas), answers))
    ]
    clients = [iter(requests)] * sequences
    outcome.seconds = asyncio.run(seconds_to_answer(f"{url}/v1/chat/completions", clients, answered))
    return outcome


def _request(number: int, schema: Any, *, limit: int) -> Body:
    body: Body = {
        "model": "model",
        "messages": [{"role": "user", "content": f"Write record {number}."}],
        "max_tokens": limit,
        "temperature": 1.0,
        "seed": number,
    }
    if schema is None:
        return body | {"ignore_eos": True, "max_tokens": limit // 2}
    named = {"name": "record", "schema": schema, "strict": True}
    return body | {"response_format": {"type": "json_schema", "json_schema": named}}


def _judged(choice: dict[str, Any], schema: Any) -> str:
    if choice["finish_reason"] == "length":
        return "cut"
    try:
        value = json.loads(choice["message"]["content"], parse_float=finite)
    except ValueError:
        return "invalid"
    return "valid" if jsonschema_rs.validator_for(schema).is_valid(value) else "invalid"


def compare(arguments: Namespace) -> Iterator[Result]:
    """Yield the figures of each server that starts."""
    schemas: list[Any] = list(SCHEMAS)
    if arguments.schemas is not None:
        schemas = [case.schema for case in islice(read_schemas(arguments.schemas), arguments.answers)]

    def measure(url: str) -> tuple[Outcome, Outcome]:
        plain, constrained = (
            send(
                url,
                schemas,
                sequences=arguments.sequences,
                answers=arguments.answers,
                constrained=constrained,
                limit=arguments.tokens,
            )
            for constrained in (False, True)
        )
        return plain, constrained

    with ExitStack() as stack:
        urls = start_each(stack, arguments.servers, arguments.model)
        for name, found in in_turns(urls, arguments.runs, measure).items():
            counts = sum((constrained.counts for _, constrained in found), Counter[str]())
            yield Result.of(name, [(plain.rate, constrained.rate) for plain, constrained in found], counts)


def parse_arguments() -> Namespace:
    options = peers_parser(__doc__)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="default: the demo model")
    options.add_argument("--schemas", type=Path, metavar="FOLDER", help="files of schemas (default: eight small ones)")
    options.add_argument("--sequences", type=at_least_one, default=16, help="clients at once (default 16)")
    options.add_argument("--answers", type=at_least_one, default=96, help="requests of each run (default 96)")
    options.add_argument("--tokens", type=at_least_one, default=256, help="the limit of an answer (default 256)")
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()
    report(
        "answers that follow a JSON schema",
        "with schemas",
        list(compare(arguments)),
        f"{arguments.sequences} clients, {arguments.answers} requests a run, {arguments.runs} runs",
        arguments.json,
    )


if __name__ == "__main__":
    main()
