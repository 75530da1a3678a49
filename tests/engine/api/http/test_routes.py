"""Rules for every route: ids, keys, errors; and the smaller routes themselves."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.logs import log_handler, request_id
from quire_engine.config import AccessOptions
from quire_engine.cpu.limits import CpuLimits

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nothing", 404, None),
        ("GET", "/%2e%2e/etc", 404, None),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("GET", "/v1/responses", 405, "POST"),
        ("POST", "/v1/models/org/name", 405, "GET"),
        ("POST", "/docs", 405, "GET"),
        ("POST", "/openapi.json", 405, "GET, HEAD"),
    ],
)
async def test_unknown_routes_and_methods_use_the_error_format(
    serving: Serving, method: str, path: str, status: int, allow: str | None
) -> None:
    async with serving("ok") as server:
        response = await server.http.request(method, path)
        assert (response.status_code, response.headers.get("allow")) == (status, allow)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/health", "/version", "/v1/models", "/v1/models/demo", "/nothing"]
)
async def test_head_is_get_without_the_body(serving: Serving, path: str) -> None:
    async with serving("ok") as server:
        whole, head = await server.http.get(path), await server.http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert head.headers["content-type"] == whole.headers["content-type"]


async def test_a_head_needs_the_same_key(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("api-key-number-1\n")
    async with serving("ok", access=AccessOptions(api_key_file=tmp_path / "api")) as server:
        assert (await server.http.head("/v1/models")).status_code == 401
        known = {"authorization": "Bearer api-key-number-1"}
        assert (await server.http.head("/v1/models", headers=known)).status_code == 200


async def test_a_wrong_body_is_400_and_never_422(serving: Serving) -> None:
    async with serving("ok") as server:
        for content, status in ((b"{", 400), (b"[]", 400), (b'{"model": 3}', 400)):
            headers = {"content-type": "application/json"}
            response = await server.http.post("/v1/chat/completions", content=content, headers=headers)
            assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"
        assert (await server.http.post("/v1/completions", content=b"x")).status_code == 415


async def test_large_body_is_413_and_the_server_keeps_serving(serving: Serving) -> None:
    async with serving("ok", max_body_bytes=2000) as server:
        response = await server.complete(prompt="x" * 3000)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert (await server.complete()).status_code == 200


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1", True), ("bad id", False), ("é" * 3, False), ("x" * 129, False), ("", False)]
)
async def test_valid_request_ids_are_returned(serving: Serving, sent: str, kept: bool) -> None:
    async with serving("ok") as server:
        response = await server.http.post(
            "/v1/completions", json={"model": "demo", "prompt": "x"}, headers={"x-request-id": sent.encode()}
        )
        returned = response.headers["x-request-id"]
        assert (returned == sent) == kept and len(returned) >= 5
        assert response.json()["id"] == f"cmpl-{returned}"


async def test_errors_contain_the_request_id(serving: Serving) -> None:
    async with serving("ok") as server:
        assert (await server.http.get("/nothing", headers={"x-request-id": "q1"})).headers["x-request-id"] == "q1"


async def test_keys_guard_the_routes(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann:secret-key-1\n")
    async with serving("ok", access=AccessOptions(api_key_file=tmp_path / "keys")) as server:
        response = await server.complete()
        assert response.status_code == 401 and response.json()["error"]["code"] == "missing_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/nothing", "/health", "/version", "/openapi.json"):
            assert (await server.http.get(path)).status_code == 401
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await server.http.get(path)).status_code == 200
        server.http.headers["authorization"] = "Bearer secret-key-1"
        assert (await server.complete()).status_code == 200
        assert server.engine.streams[0].routing["tenant"] == "ann"


@pytest.mark.parametrize("has_keys", [False, True])
async def test_engine_learns_the_tenant_from_a_gateway(serving: Serving, tmp_path: Path, has_keys: bool) -> None:
    """It decides about sharing and prefixes without keys, and only keeps prefixes apart with keys."""
    (tmp_path / "keys").write_text("ann:secret-key-1\n")
    options = {"access": AccessOptions(api_key_file=tmp_path / "keys")} if has_keys else {}
    async with serving("ok", **options) as server:
        server.http.headers["x-quire-tenant"] = "a" * 64
        if has_keys:
            refused = await server.complete()
            assert refused.status_code == 401 and "X-Quire-Engine-Key" in refused.json()["error"]["message"]
            server.http.headers["authorization"] = "Bearer secret-key-1"
        assert (await server.complete()).status_code == 200
        server.http.headers["x-quire-tenant"] = "team-b"
        wrong = await server.complete()
        assert wrong.status_code == 400 and "X-Quire-Tenant" in wrong.json()["error"]["message"]
    routing = server.engine.streams[0].routing
    expected = ("ann", "a" * 64) if has_keys else ("a" * 64, None)
    assert (routing["tenant"], routing["gateway_tenant"]) == expected


async def test_probes_follow_the_engine(serving: Serving) -> None:
    async with serving(ready=False) as server:
        server.engine.state = "starting"
        assert (await server.http.get("/readyz")).json() == {"status": "starting"}
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/livez")).status_code == 200
        server.engine.state, server.engine.failure = "failed", "it was restarted 5 times"
        live = await server.http.get("/livez")
        assert live.status_code == 503 and live.json()["reason"] == "it was restarted 5 times"
    async with serving() as server:
        assert (await server.http.get("/readyz")).json() == {"status": "ready"}


async def test_models_are_listed_by_every_name(serving: Serving) -> None:
    async with serving("ok") as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
            ("demo", "demo", 512),
            ("alias", "demo", 512),
        ]
        assert (await server.http.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await server.http.get("/v1/models/a/b")).status_code == 404


async def test_version(serving: Serving) -> None:
    async with serving() as server:
        assert (await server.http.get("/version")).json() == {"version": "0.1.0", "cpu": None}


async def test_version_names_the_level_of_the_cpu(serving: Serving) -> None:
    async with serving() as server:
        environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
        server.engine.cpu = CpuLimits(
            level="avx512", kernels="x86-64-v4", environment=environment, left_out={"avx512-bf16": "killed by SIGILL"}
        )
        assert (await server.http.get("/version")).json()["cpu"] == {
            "level": "avx512",
            "kernels": "x86-64-v4",
            "environment": environment,
            "left_out": [{"feature": "avx512-bf16", "reason": "killed by SIGILL"}],
        }


async def test_tokenize_and_detokenize_round_trip(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        made = (await server.http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
        assert made["count"] == 3 and made["tokens"] == token_ids("aé") and made["max_model_len"] == 512
        assert made["token_strs"][0] == "a"
        back = await server.http.post("/detokenize", json={"model": "demo", "tokens": made["tokens"]})
        assert back.json() == {"prompt": "aé"}
        chat = await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert chat.json()["tokens"] == token_ids("<user>Hi\n<assistant>")


_TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{{ reasoning_effort }}{{ enable_thinking }}{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}, "x": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [_TOOL]},
        {"tools": []},
        {"chat_template_kwargs": {"mood": "calm"}},
        {"reasoning_effort": "low", "enable_thinking": False},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True, "tools": [_TOOL]},
        {"add_special_tokens": True},
        {"chat_template": None, "mm_processor_kwargs": {}},
    ],
    ids=str,
)
async def test_tokens_of_a_chat_are_those_of_its_prompt(serving: Serving, fields: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
    async with serving("ok", template=_TOOL_TEMPLATE) as server:
        assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
        answer = (await server.http.post("/tokenize", json=body)).json()
        (stream,) = server.engine.streams
        assert answer["tokens"] == list(stream.prompt) and answer["count"] == len(stream.prompt)


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [_TOOL]}, "has no place for tools"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}]}, "tools[0]"),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message: needs",
        ),
        ("/tokenize", {"prompt": "a", "tools": [_TOOL]}, "tools: is only allowed with messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template: is not supported in requests"),
        ("/tokenize", {}, "either prompt or messages is required"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour: unknown field"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model: 'other'"),
        ("/detokenize", {"tokens": ["a"]}, "tokens: should be an array of token ids"),
        ("/detokenize", {"tokens": [99999]}, "tokens: 99999 "),
    ],
)
async def test_tokenize_refuses_invalid_input(serving: Serving, path: str, body: dict[str, Any], part: str) -> None:
    async with serving() as server:
        response = await server.http.post(path, json=body)
        assert response.status_code in (400, 404) and part in response.json()["error"]["message"]


async def test_the_prefix_cache_is_reset_on_request(serving: Serving) -> None:
    async with serving() as server:
        assert (await server.http.post("/admin/cache/reset")).json() == {"status": "reset"}
        assert server.engine.resets == 1


async def test_openapi_document_describes_request_bodies(serving: Serving) -> None:
    async with serving() as server:
        document = (await server.http.get("/openapi.json")).json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] == ["messages"] and body["additionalProperties"] is False
        assert "$ref" not in json.dumps(body)


async def test_docs_page_needs_no_internet_resources(serving: Serving) -> None:
    async with serving() as server:
        page = (await server.http.get("/docs")).text
        named = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(named) == 3 and "/openapi.json" in page
        for address in named:
            assert address.startswith("/docs/"), address
            file = await server.http.get(address)
            assert file.status_code == 200 and len(file.content) > 100


async def test_request_log_line_has_no_prompt_and_no_output(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    async with serving("answer", log_requests=True) as server:
        with caplog.at_level(logging.INFO, logger="quire_engine"):
            await server.complete(prompt="secret")
        (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("middleware")]
        assert (
            line.startswith("POST /v1/completions 200 ") and "secret" not in caplog.text and "answer" not in caplog.text
        )


def test_log_lines_carry_the_requests_id() -> None:
    record = logging.LogRecord("quire_engine.x", logging.WARNING, "file", 1, "queue of %d is full", (3,), None)
    token = request_id.set("q7")
    try:
        entry = json.loads(log_handler("json").format(record))
        assert (entry["message"], entry["level"], entry["request_id"]) == ("queue of 3 is full", "warning", "q7")
        assert log_handler("text").format(record).endswith("warning queue of 3 is full [q7]")
    finally:
        request_id.reset(token)


async def raw(address: str, *parts: bytes) -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def test_endless_headers_are_cut_off(serving: Serving) -> None:
    async with serving() as server:
        answer = await raw(server.address, b"GET /livez HTTP/1.1\r\nx: ", *[b"y" * 8192] * 9)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"error"' in answer


async def test_a_body_larger_than_the_bound_on_headers_is_no_header(serving: Serving) -> None:
    async with serving("ok") as server:
        for _ in range(2):  # on one connection
            assert (await server.complete(prompt="x" * 130_000, truncate_prompt_tokens=5)).status_code == 200


async def test_data_that_is_not_http_gets_400_and_is_closed(serving: Serving) -> None:
    async with serving() as server:
        assert (await raw(server.address, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await server.http.get("/livez")).status_code == 200


async def test_root_path_does_not_bypass_keys(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("api-key-number-1\n")
    (tmp_path / "admin").write_text("admin-key-number-1\n")
    access = AccessOptions(api_key_file=tmp_path / "api", admin_key_file=tmp_path / "admin")
    key = {"authorization": "Bearer api-key-number-1"}
    async with serving("ok", access=access, root_path="/llm") as server:
        for path in ("/llm/v1/models", "/v1/models"):
            assert (await server.http.get(path, headers=key)).status_code == 200
            assert (await server.http.get(path)).status_code == 401
        assert (await server.http.get("/llm/livez")).status_code == 200
        for path in ("/admin/drain", "/llm/admin/drain"):
            assert (await server.http.post(path, headers=key)).status_code == 401
        for path in ("/llm/llm/v1/models", "/llm/llm/admin/drain", "/llmx/v1/models"):
            assert (await server.http.get(path, headers=key)).status_code == 404
        assert "/llm/openapi.json" in (await server.http.get("/docs", headers=key)).text
        page = (await server.http.get("/llm/openapi.json", headers=key)).json()
        assert page["servers"] == [{"url": "/llm"}]
