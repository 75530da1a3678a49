"""The server against its own OpenAPI document, by schemathesis: it accepts, rejects and answers as documented.

``QUIRE_HYPOTHESIS_EXAMPLES`` sets the number of requests of each kind.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode

from quire_engine.api.answer_schemas import ChatCompletionChunk, Completion, MessageEvent, ResponseEvent

EXAMPLES = int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "20"))

load_all_checks()
CHECKS = {check.__name__: check for check in schemathesis.checks.CHECKS.get_all()}
ALWAYS = [CHECKS["not_a_server_error"], CHECKS["status_code_conformance"], CHECKS["content_type_conformance"]]
ALWAYS += [CHECKS["response_schema_conformance"], CHECKS["response_headers_conformance"]]

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/quire/v1/adapters"),
    ("POST", "/admin/cache/reset"),
]
POOLING = [
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/score"),
]
"""The routes of a server that pools; any other answers them with 400."""
NOT_TRIED = {
    ("POST", "/admin/drain"),  # nothing can be tested afterwards
    ("POST", "/v1/load_lora_adapter"),  # closed where the server has no adapters
    ("POST", "/v1/unload_lora_adapter"),
}
WITH_BODIES = [operation for operation in OPERATIONS if operation[0] == "POST" and "/admin/" not in operation[1]]

SEMANTIC = re.compile(
    r"only allowed with messages|context of \d+ tokens|prompt: is empty|differs from max_tokens"
    r"|has no tokens of this|at most \d+ are accepted|exceeds the limit of \d+|may forbid"
    r"|min_tokens|max_tokens|chat template|is not a token id of this model|may not set|that may be queued"
    r"|either prompt or messages|content: is required|continue_final_message|at most \d+ are accepted"
    r"|schema: |should be an object with a type|the type .{2,60} is not supported|tool_choice: "
    r"|tools: |has no block"
    r"|is required for the type tool|should be a JSON object in a string"
    r"|has no reasoning|top_logprobs: needs|include: |item \d+ is empty|exceeds the \d+ dimensions|text_1: has"
    r"|cannot be compiled|is not JSON|exactly one of|one constraint|is required for the type"
)
"""Limits in the combination of fields, in the model, or in the load, which a schema cannot express."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with start_server("--max-model-len", "256", "--check-integrity", fake={"num_blocks": 2048}) as made:
        yield made


@pytest.fixture(scope="module")
def pooling_server(start_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    flags = ("--runner", "pooling", "--max-model-len", "256", "--check-integrity")
    with start_server(*flags, fake={"num_blocks": 2048}) as made:
        yield made


@pytest.fixture(scope="module")
def pooling_schema(pooling_server: Any) -> Any:
    loaded = schemathesis.openapi.from_dict(pooling_server.http.get("/openapi.json").json())
    loaded.config.update(base_url=pooling_server.address)
    return loaded


@pytest.fixture(scope="module")
def document(server: Any) -> Any:
    return server.http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def schema(document: Any, server: Any) -> Any:
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=server.address)
    loaded.config.max_stream_events = 1_000_000
    return loaded


def test_the_document_has_every_route(document: Any) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {*OPERATIONS, *POOLING, *NOT_TRIED}


def check_events(text: str, kind: type[BaseModel]) -> None:
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "") and events
    for event in events:
        kind.model_validate_json(event.removeprefix("data: "))


NAMED_EVENTS: dict[str, tuple[type[MessageEvent | ResponseEvent], tuple[str, ...]]] = {
    "/v1/messages": (MessageEvent, ("message_stop",)),
    "/v1/responses": (ResponseEvent, ("response.completed", "response.incomplete")),
}


def check_named_events(text: str, kind: type[MessageEvent | ResponseEvent], last: tuple[str, ...]) -> None:
    *events, end = text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert kind.model_validate_json(data.removeprefix("data: ")).type == name.removeprefix("event: ")
    assert name.removeprefix("event: ") in last


def ask(server: Any, case: Any) -> Any:
    return case.call(headers={"Authorization": f"Bearer {server.key}"}, timeout=60)


def tried(schema: Any, operation: tuple[str, str], mode: GenerationMode, check: Callable[[Any], None]) -> None:
    """Run ``check`` with that many requests of one operation."""
    method, path = operation

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        check(case)

    run()


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_valid_requests_get_documented_responses(server: Any, schema: Any, operation: tuple[str, str]) -> None:
    def check(case: Any) -> None:
        response = ask(server, case)
        case.validate_response(response, checks=ALWAYS)
        if response.status_code == 400:
            assert SEMANTIC.search(response.json()["error"]["message"]), (case.body, response.text)
        else:
            assert response.status_code in (200, 404, 429), response.text
        if "event-stream" in response.headers["content-type"][0]:
            if operation[1] in NAMED_EVENTS:
                check_named_events(response.text, *NAMED_EVENTS[operation[1]])
            else:
                check_events(response.text, ChatCompletionChunk if "chat" in operation[1] else Completion)

    tried(schema, operation, GenerationMode.POSITIVE, check)


@pytest.mark.parametrize("operation", POOLING, ids=" ".join)
def test_pooling_routes_match_the_openapi_document(
    pooling_server: Any, pooling_schema: Any, operation: tuple[str, str]
) -> None:
    def check(case: Any) -> None:
        response = ask(pooling_server, case)
        case.validate_response(response, checks=ALWAYS)
        assert response.status_code == 200 or SEMANTIC.search(response.json()["error"]["message"]), response.text

    def check_refused(case: Any) -> None:
        response = ask(pooling_server, case)
        case.validate_response(response, checks=[*ALWAYS, CHECKS["negative_data_rejection"]])

    tried(pooling_schema, operation, GenerationMode.POSITIVE, check)
    tried(pooling_schema, operation, GenerationMode.NEGATIVE, check_refused)


@pytest.mark.parametrize("operation", WITH_BODIES, ids=" ".join)
def test_invalid_requests_are_rejected_as_documented(server: Any, schema: Any, operation: tuple[str, str]) -> None:
    def check(case: Any) -> None:
        response = ask(server, case)
        case.validate_response(response, checks=[*ALWAYS, CHECKS["negative_data_rejection"]])
        assert response.status_code == 200 or len(response.content) <= 4096

    tried(schema, operation, GenerationMode.NEGATIVE, check)


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_authentication_and_methods_match_the_document(server: Any, document: Any, operation: tuple[str, str]) -> None:
    method, path = operation
    described = document["paths"][path][method.lower()]
    with httpx.Client(base_url=server.address) as stranger:
        status = stranger.request(method, path, json={}).status_code
        assert (status == 401) == bool(described["security"])
    other = server.http.request("PUT", path.format(name="demo", id="x"))
    assert other.status_code == 405 and method in other.headers["allow"] and "error" in other.json()


def test_no_request_is_left_running(server: Any, pooling_server: Any) -> None:
    server.assert_nothing_is_left()
    pooling_server.assert_nothing_is_left()
