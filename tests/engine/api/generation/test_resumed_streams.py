"""The gateway keeps what an engine needs to continue a stream: the same events follow, wherever it is cut."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from quire_common.contract.engine import RESUMABLE_HEADER, RESUME_FIELD
from quire_engine.api.stream import digest_of
from quire_gateway.bodies import Body, BodyMemory
from quire_gateway.event_stream import OpenStream

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]

SEED = 11
HEADERS = {RESUMABLE_HEADER: "1", "x-request-id": "one"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'Wait. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
USAGE = {"stream_options": {"include_usage": True}}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": ("/v1/completions", {"prompt": "Hi", **USAGE}, "Grüße, 世界! Fine."),
    "completion with echo": ("/v1/completions", {"prompt": "Hi", "echo": True, **USAGE}, "Good day"),
    "stop string": ("/v1/completions", {"prompt": "Hi", "stop": ["ENDE"], **USAGE}, "an ENDlich ENDE gone"),
    "token ids": ("/v1/completions", {"prompt": "Hi", "return_token_ids": True}, "Gr\u00fc\u00dfe"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **USAGE}, "Grüße!"),
    "usage in every chunk": (
        "/v1/chat/completions",
        {"messages": [], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "Fine.",
    ),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, CALL),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99}, "Grüße!"),
}
"""The route, the fields of the request, and the text that the model says."""


def body_of(fields: dict[str, Any]) -> bytes:
    if fields.get("messages") == []:
        fields = fields | {"messages": [{"role": "user", "content": "x"}]}
    return json.dumps({"max_tokens": 99, "seed": SEED, **fields, "model": "demo", "stream": True}).encode()


async def events(server: Any, path: str, body: bytes, ids: list[int], eos: int, number: int = 0) -> bytes:
    """Return the stream of these tokens, each a step of its own, the last one an end-of-sequence token."""
    request = server.http.build_request(
        "POST", path, content=body, headers={**HEADERS, "content-type": "application/json"}
    )
    sending = server.http.send(request, stream=True)
    task = asyncio.ensure_future(sending)
    submitted = asyncio.ensure_future(server.engine.stream(number))
    await asyncio.wait({task, submitted}, return_when=asyncio.FIRST_COMPLETED)
    if not submitted.done():
        submitted.cancel()
        raise AssertionError(await (await task).aread())
    stream = await submitted
    for each in ids:
        stream.draw([each])
    stream.draw([eos], "stop", stop_id=eos)
    response = await task
    assert response.status_code == 200, await response.aread()
    assert response.headers[RESUMABLE_HEADER] == "yes"
    return await response.aread()


def relayed(stream: OpenStream, data: bytes) -> bytes:
    stream.start(is_announced=True)
    return same_ids(stream.feed(data) + stream.flush())


def same_ids(data: bytes) -> bytes:
    """Replace the random ids of tool calls, which a stream contains once each."""
    return re.sub(rb"call_\w+|chatcmpl-tool-\w+", b"ID", data)


@pytest.mark.parametrize("case", CASES)
async def test_stream_resumes_after_a_cut_at_any_event(serving: Serving, token_ids: TokenIds, case: str) -> None:
    path, fields, text = CASES[case]
    body, ids = body_of(fields), token_ids(text)
    template = HERMES if case == "tools" else None
    options = {"resumable_streams": True} | ({} if template is None else {"template": template})
    async with serving(**options) as server:
        data = await events(server, path, body, ids, token_ids("<|eos|>")[0])
        whole = relayed(OpenStream(Body(BodyMemory(2**22), "")), data)
        parts = data.split(b"\n\n")[:-1]
        number = 0
        # The last part is the end of the stream: after it nothing is left to continue.
        for cut in range(1, len(parts) - 3):
            stream = OpenStream(Body(BodyMemory(2**22), ""))
            stream.start(is_announced=True)
            before = same_ids(stream.feed(b"".join(part + b"\n\n" for part in parts[:cut])))
            continued = stream.body(body)
            known = json.loads(continued)[RESUME_FIELD]["token_ids"]
            assert known == ids[: len(known)]
            number += 1
            after = relayed(
                stream, await events(server, path, continued, ids[len(known) :], token_ids("<|eos|>")[0], number)
            )
            assert before + after == whole, cut
            sent = server.engine.streams[number]
            assert list(sent.routing["output_token_ids"]) == known
            assert sent.params.seed == server.engine.streams[0].params.seed == SEED
        assert number > 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "several answers"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_regex": "a+"}, "a grammar"),
    ],
)
async def test_streams_that_cannot_resume_report_the_reason(
    serving: Serving, fields: dict[str, Any], reason: str
) -> None:
    async with serving("aaaa", resumable_streams=True) as server:
        body = body_of({"prompt": "Hi", **fields})
        headers = {**HEADERS, "content-type": "application/json"}
        response = await server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers[RESUMABLE_HEADER] == f"no: {reason}"
    assert ": quire-" not in response.text


@pytest.mark.parametrize(("enabled", "asked"), [(False, True), (True, False)])
async def test_tokens_are_sent_to_gateways_only_if_enabled(serving: Serving, enabled: bool, asked: bool) -> None:
    async with serving("aaaa", resumable_streams=enabled) as server:
        headers = {"content-type": "application/json"} | ({RESUMABLE_HEADER: "1"} if asked else {})
        response = await server.http.post("/v1/completions", content=body_of({"prompt": "Hi"}), headers=headers)
    assert response.status_code == 200
    assert RESUMABLE_HEADER not in response.headers and ": quire-" not in response.text


FACTS = {"seed": 1, "created": 1, "prompt": "00", "token_ids": []}


@pytest.mark.parametrize(
    ("facts", "fields", "says"),
    [
        (FACTS, {}, "the prompt has other tokens"),
        (FACTS, {"n": 2}, "several answers"),
        ({**FACTS, "seed": "x"}, {}, "seed"),
        ({**FACTS, "prompt": None, "token_ids": list(range(99))}, {}, "leave none"),
        ({**FACTS, "prompt": None, "token_ids": [10**6]}, {}, "not below"),
        ({**FACTS, "prompt": None, "token_ids": [-1]}, {}, "not below"),
        ({**FACTS, "prompt": None, "seed": 2**63}, {}, "64 bits"),
        ({**FACTS, "prompt": None, "token_ids": "a END"}, {"stop": ["END"]}, "end the answer"),
    ],
)
async def test_inconsistent_continuation_is_refused(
    serving: Serving, token_ids: TokenIds, facts: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    if isinstance(facts["token_ids"], str):
        facts = facts | {"token_ids": token_ids(facts["token_ids"])}
    facts = facts | ({"prompt": digest_of(token_ids("Hi"))} if facts["prompt"] is None else {})
    async with serving("aaaa", resumable_streams=True) as server:
        body = body_of({"prompt": "Hi", RESUME_FIELD: facts, **fields})
        headers = {**HEADERS, "content-type": "application/json"}
        response = await server.http.post("/v1/completions", content=body, headers=headers)
        known = await server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, RESUME_FIELD) and says in error["message"], error
    # From a client the field is unknown.
    assert known.status_code == 400 and RESUME_FIELD in known.json()["error"]["message"]
