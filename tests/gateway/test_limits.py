"""The limits of API keys hold over all replicas, and over several gateways."""

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from set_clock import SetClock

from quire_common.contract.engine import USAGE_HEADER
from quire_common.errors import KeyFileError
from quire_common.key_file import Key, KeyLimits
from quire_common.rate_limits import Allowance
from quire_gateway.__main__ import main
from quire_gateway.endpoints.kubernetes_objects import KubeSlice, count_gateways
from quire_gateway.errors import BadRequest, RateLimited
from quire_gateway.limits import Charge, admitted, gateway_allowances
from quire_gateway.prompt import num_prompts, peek_request

KEY = "sk-0123456789"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def allowance(clock: SetClock, *, gateways: int = 1, **limits: int) -> Allowance:
    found = gateway_allowances(clock, lambda: gateways).of(Key(name="a", digest=b"", limits=KeyLimits(**limits)))
    assert found is not None
    return found


# --- the share of one gateway ---


@pytest.mark.parametrize(("limit", "gateways"), [(6, 1), (6, 2), (6, 4), (1, 3)])
def test_gateways_together_enforce_the_request_limit(limit, gateways):
    """The limit holds over ten minutes after the first burst, however clients spread their requests."""
    clock = SetClock()
    each = [allowance(clock, gateways=gateways, requests_per_minute=limit) for _ in range(gateways)]
    allowed = []
    for second in range(900):
        clock.now = float(second)
        for one in each:
            try:
                one.charge_request()
                allowed.append(second)
            except RateLimited as error:
                assert error.retry_after_seconds is not None and error.retry_after_seconds >= 1
    assert abs(sum(second >= 300 for second in allowed) - 10 * limit) <= gateways


def test_tokens_are_charged_when_the_answer_ends():
    clock = SetClock()
    one = allowance(clock, gateways=2, tokens_per_minute=200)
    with admitted(one, sequences=1, prompt_tokens=50) as charge:
        charge.read(b'{"usage": {"prompt_tokens": 60, "total_tokens": 160}}')
        charge.end()
    with pytest.raises(RateLimited) as refused, admitted(one, sequences=1, prompt_tokens=1):
        pass
    # The share is 100 per minute, and 160 were used, so 61 must be refilled.
    assert refused.value.retry_after_seconds == 37
    clock.now = 37.0
    with admitted(one, sequences=1, prompt_tokens=1):
        pass


def test_concurrency_is_divided_and_each_gateway_allows_one():
    for limit, gateways, share in ((4, 1, 4), (4, 2, 2), (5, 2, 2), (1, 3, 1)):
        one = allowance(SetClock(), gateways=gateways, max_concurrent=limit)
        full = admitted(one, sequences=share, prompt_tokens=0)
        with full, pytest.raises(RateLimited), admitted(one, sequences=1, prompt_tokens=0):
            pass
        with pytest.raises(BadRequest), admitted(one, sequences=share + 1, prompt_tokens=0):
            pass
        assert one.running == 0


def test_limits_follow_the_key_file_and_the_number_of_gateways():
    number = [1]
    limits = gateway_allowances(SetClock(), lambda: number[0])
    key = Key(name="a", digest=b"", limits=KeyLimits(requests_per_minute=4))
    found = limits.of(key)
    assert found is not None and found.headers()["x-ratelimit-remaining-requests"] == "4"
    for _ in range(2):
        found.charge_request()
    number[0] = 2
    again = limits.of(key)
    assert again is found and found.num_servers == 2
    assert limits.of(Key(name="b", digest=b"")) is None


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        ([b'data: {"choices": []}\n\n', b"data: {}\n\ndata: [DONE]\n\n"], 13),
        ([b'data: {"usage": {"total_tokens": 7}}\n\n', b"data: [DONE]\n\n"], 7),
        ([b'data: {"text": "\\"total_tokens\\": 900"}\n\n'], 11),
        ([b'{"choices": [', b'], "usage": {"total_', b'tokens":42}}'], 42),
        ([b'data: {}\n\n: quire-usage {"total_tokens":5}\n\ndata: [DONE]\n\n'], 5),
        ([b'data: {"text": "it said: quire-usage 5"}\n\n', b"data: [DONE]\n\n"], 12),
        ([b'{"text": "a", "usage": {"total_tokens": 9}, "kv_transfer_params": null}'], 9),
        ([b'{"usage": {"input_tokens": 4, "cache_read_input_tokens": 30, "output_tokens": 2}}'], 36),
        ([b'{"usage": {"type": "duration", "seconds": 7}}'], 10),
        ([b'{"usage": {"total_tokens": -7}}'], 10),
        ([b'{"usage": {"total_tokens": 1e999}}'], 10),
        ([b'{"usage": {"total_tokens": 5000000000}}'], 10),
        ([], 10),
    ],
)
def test_tokens_of_an_answer(data, tokens):
    charge = Charge(10.0)
    charge.start_attempt()
    passed = b"".join(charge.read(each) for each in data)
    charge.end()
    assert charge.tokens() == tokens
    sent = b"".join(data)
    assert passed == sent.replace(b': quire-usage {"total_tokens":5}\n\n', b"")


_SPOOFS = (
    {"total_tokens": 0},
    {"usage": {"total_tokens": 0}},
    {"usage": {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}},
)
"""Parts of a JSON schema, or of a tool, that an answer repeats as they came."""


@pytest.mark.parametrize("spoof", _SPOOFS)
@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("usage", [None, {"total_tokens": 77}])
def test_text_of_the_client_is_not_read_as_usage(spoof, spaced, usage):
    """However an answer repeats it, and wherever its parts are cut, it sets no number of tokens."""
    separators = None if spaced else (",", ":")
    echo = {"text": {"format": {"schema": spoof}}, "tools": [{"parameters": spoof}], "metadata": spoof}
    nested = json.dumps({"type": "response.created", "response": {**echo, "usage": usage}}, separators=separators)
    whole = json.dumps({**echo, "usage": usage}, separators=separators).encode()
    event = b"event: response.created\ndata: " + nested.encode() + b"\n\n"
    for end in (b"", b": quire-usage " + json.dumps({"total_tokens": 300}).encode() + b"\n\n"):
        charge = Charge(10.0)
        charge.start_attempt()
        charge.read(event)
        charge.read(b'data: {"delta": "a"}\n\n' + end)
        # Without the comment the client has left, or the engine sends none: the prompt and one for each event.
        assert charge.tokens() == (300 if end else 12)
    for at in range(len(whole)):
        charge = Charge(10.0)
        charge.start_attempt()
        charge.read(whole[:at])
        assert charge.tokens() == 10
        charge.read(whole[at:])
        charge.end()
        assert charge.tokens() == (77 if usage else 10)


# --- the number of sequences ---


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("a text", 1),
        ([1, 2, 3], 1),
        ([], 1),
        (["a", 'b " [ ] \\', "c"], 3),
        ([[1, 2], [3], []], 3),
        (["x" * 100_000] * 20, 20),
    ],
)
def test_prompts_are_counted_without_being_decoded(prompt, count):
    text = json.dumps(prompt).encode()
    assert num_prompts(memoryview(text)) == count
    assert num_prompts(memoryview(b" \n" + text)) == count


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"messages": [{"role": "user", "content": "x"}], "n": 4}, 4),
        ({"prompt": "a", "n": "many"}, 1),
        ({"prompt": "a", "n": -1}, 1),
        ({"prompt": "a", "n": 4.0}, 4),
        ({"prompt": "a", "n": "4"}, 4),
        ({"prompt": "a", "n": 1e300}, 1_000_000),
        ({"prompt": "a", "n": None}, 1),
    ],
)
def test_sequences_are_prompts_times_answers(fields, sequences):
    body = json.dumps({"model": "chat", **fields}).encode()
    assert peek_request(body, is_generating=True, counts_sequences=True).sequences == sequences
    assert peek_request(body, is_generating=False, counts_sequences=True).sequences == 0


@pytest.mark.parametrize("field", ["prompt", "documents", "text_1"])
def test_a_prompt_that_is_nested_too_deeply_is_a_bad_request(field):
    """The depth that can be read depends on the stack, so all depths up to the limit of the interpreter are tried."""
    refused = 0
    for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit() + 10):
        body = b'{"model": "chat", "%b": %b%b}' % (field.encode(), b"[" * depth, b"]" * depth)
        try:
            peek_request(body, is_generating=True, counts_sequences=True)
        except BadRequest as error:
            assert "nested too deeply" in error.message
            refused += 1
    assert refused


def test_prompts_of_two_named_keys_share_no_blocks():
    body = json.dumps({"model": "chat", "prompt": "x" * 1000}).encode()
    by_tenant = [peek_request(body, is_generating=True, tenant=name).blocks for name in ("alice", "bob", None, "alice")]
    assert by_tenant[0] == by_tenant[3] and len(by_tenant[0]) == 3
    assert not set(by_tenant[0]) & set(by_tenant[1]) and not set(by_tenant[0]) & set(by_tenant[2])


# --- the whole gateway ---


def keys_file(folder: Path, limits: str) -> Path:
    (folder / "keys").write_text(f"name=team-a {limits} {KEY}\n")
    return folder / "keys"


@pytest.fixture
async def start_limited(start_gateway, replicas, tmp_path: Path):
    async def start(limits: str, count: int = 1, **options: object):
        gateway = await start_gateway(api_key_file=keys_file(tmp_path, limits), **options)
        fleet = [await replicas(f"chat-{number}") for number in range(count)]
        await gateway.push(chat=[replica.endpoint() for replica in fleet])
        return gateway, fleet

    return start


async def ask(gateway, **fields: object) -> tuple[int, str | None, str | None]:
    """Return status, the error's code, and Retry-After."""
    body = {"model": "chat", "prompt": "x", **fields}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=body, headers=AUTHORIZED) as response:
        error = (await response.json()).get("error") or {}
        return response.status, error.get("code"), response.headers.get("Retry-After")


async def test_request_limit_holds_over_all_replicas(start_limited):
    gateway, fleet = await start_limited("requests_per_minute=1", count=2)
    answers = [await ask(gateway) for _ in range(6)]
    assert [status for status, *_ in answers] == [200, *[429] * 5]
    assert answers[1][1] == "rate_limit_exceeded" and int(answers[1][2]) > 0
    assert sum(len(replica.bodies) for replica in fleet) == 1


@pytest.mark.parametrize("refused", [{"model": "nothing"}, {"prompt": 7, "model": 7}])
async def test_refused_requests_count_too(start_limited, refused):
    gateway, _ = await start_limited("requests_per_minute=1")
    assert (await ask(gateway, **refused))[0] in (400, 404)
    assert (await ask(gateway))[0] == 429


async def test_token_limit_counts_the_answers(start_limited):
    gateway, (chat,) = await start_limited("tokens_per_minute=100")

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers[USAGE_HEADER] == "1"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b': quire-usage {"prompt_tokens":5,"total_tokens":130}\n\ndata: [DONE]\n\n')
        return response

    chat.behaviour = answer
    body = {"model": "chat", "prompt": "x", "stream": True}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=body, headers=AUTHORIZED) as response:
        assert await response.text() == 'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
    assert (await ask(gateway))[:2] == (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("status", "code", "next_status"),
    [
        (429, "queue_full", 200),
        (503, "engine_restarting", 200),
        (400, "context_length_exceeded", 200),
        # The engine worked on the request before it stopped.
        (503, "engine_stopped", 429),
    ],
)
async def test_refused_request_uses_no_tokens(start_limited, status, code, next_status):
    gateway, (chat,) = await start_limited("tokens_per_minute=100", hold_timeout_seconds=0.05)

    chat.refuse(status, code)
    assert (await ask(gateway, prompt="x" * 2000))[0] >= 400
    chat.behaviour = chat.say_name
    assert (await ask(gateway))[0] == next_status


async def test_request_of_a_client_that_leaves_uses_tokens(start_limited):
    gateway, (chat,) = await start_limited("tokens_per_minute=100")
    chat.answer_after(asyncio.Event())
    leaving = asyncio.create_task(ask(gateway, prompt="x" * 2000))
    await chat.arrived.wait()
    leaving.cancel()
    await chat.left.wait()
    assert (await ask(gateway))[:2] == (429, "rate_limit_exceeded")


async def test_concurrency_limit_is_released_when_requests_end(start_limited):
    gateway, (chat,) = await start_limited("max_concurrent=2")
    assert (await ask(gateway, n=3))[0] == 400
    assert [(await ask(gateway, n=2))[0] for _ in range(3)] == [200, 200, 200]
    assert len(chat.bodies) == 3


async def test_concurrency_is_charged_before_a_body_is_read(start_limited):
    gateway, (chat,) = await start_limited("max_concurrent=2")
    go_on = asyncio.Event()

    async def slowly():
        yield b'{"model": "chat", '
        await go_on.wait()
        yield b'"prompt": "x"}'

    async def upload() -> int:
        url = f"{gateway.url}/v1/completions"
        async with gateway.client.post(url, data=slowly(), headers=AUTHORIZED) as response:
            return response.status

    uploads = [asyncio.create_task(upload()) for _ in range(2)]
    while gateway.gateway.body_memory.used_bytes < 2 * len(b'{"model": "chat", '):
        await asyncio.sleep(0.005)
    assert (await ask(gateway))[:2] == (429, "rate_limit_exceeded")
    go_on.set()
    assert await asyncio.gather(*uploads) == [200, 200]
    assert (await ask(gateway, n=2))[0] == 200


async def test_request_limit_holds_over_two_gateways(start_gateway, replicas, tmp_path: Path):
    file = keys_file(tmp_path, "requests_per_minute=4")
    gateways = [await start_gateway(api_key_file=file, num_gateways=2) for _ in range(2)]
    chat = await replicas("chat-0")
    for gateway in gateways:
        await gateway.push(chat=[chat.endpoint()])
    statuses = [(await ask(gateway))[0] for _ in range(5) for gateway in gateways]
    assert sorted(statuses) == [200] * 4 + [429] * 6
    assert len(chat.bodies) == 4


async def test_refusal_for_a_key_is_not_repeated_on_other_replicas(start_limited):
    gateway, fleet = await start_limited("", count=3)

    for replica in fleet:
        replica.refuse(429, "rate_limit_exceeded", **{"Retry-After": "9"})
    assert await ask(gateway) == (429, "rate_limit_exceeded", "9")
    assert sum(len(replica.bodies) for replica in fleet) == 1


async def test_full_queue_is_tried_on_other_replicas(start_limited):
    gateway, fleet = await start_limited("", count=2)

    for replica in fleet:
        replica.refuse(429, "queue_full")
    assert (await ask(gateway))[:2] == (429, "queue_full")
    assert [len(replica.bodies) for replica in fleet] == [1, 1]


# --- the number of gateways ---


def test_ready_gateways_are_counted_once_each():
    def pod(name: str, address: str, **conditions: bool) -> dict[str, object]:
        return {"addresses": [address], "targetRef": {"name": name}, "conditions": conditions}

    slices = [
        {"metadata": {}, "endpoints": [pod("a", "10.0.0.1", ready=True), pod("b", "10.0.0.2", ready=False)]},
        {"metadata": {}, "endpoints": [pod("a", "fd00::1"), pod("c", "10.0.0.3", ready=True, terminating=True)]},
        {"metadata": {}, "endpoints": None},
    ]
    assert count_gateways([msgspec.convert(item, KubeSlice) for item in slices]) == 1
    assert count_gateways([]) == 0


async def test_limits_are_refused_if_the_gateways_cannot_be_counted(start_gateway, tmp_path: Path):
    """In a cluster several gateways share a key."""
    with pytest.raises(KeyFileError, match="--gateway-service or --gateways"):
        await start_gateway(api_key_file=keys_file(tmp_path, "requests_per_minute=9"), num_gateways=None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--endpoints-file", "x", "--gateway-service", "a/b"], "--gateway-service requires --kubernetes"),
        (["--kubernetes", "--gateway-service", "b"], "--gateway-service: expected NAMESPACE/NAME"),
        (["--kubernetes", "--gateway-service", "a/b", "--gateways", "2"], "exclude each other"),
    ],
)
def test_sources_of_the_number_of_gateways_are_checked(capsys, arguments, problem):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


# --- names ---


async def test_hidden_names_appear_in_no_response(start_gateway, replicas):
    gateway = await start_gateway(hides_names=True)
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()], secret=[])
    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        assert response.status == 200 and "X-Quire-Replica" not in response.headers
    status, body = await gateway.complete("nothing")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "secret" not in body["error"]["message"] and "chat" not in body["error"]["message"]
    async with gateway.client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert response.status == 400 and "secret" not in await response.text()
    assert (await gateway.page("/v1/models"))["data"] == []
    assert (await gateway.page("/v1/models/chat"))["id"] == "chat"
