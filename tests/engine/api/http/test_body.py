"""The bodies that clients may send, and the errors for invalid ones."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from quire_engine.api import body as body_module
from quire_engine.api.body import SMALL_BYTES, BodyBudget, validate_body
from quire_engine.api.chat import ChatCompletionRequest
from quire_engine.api.problems import error_body
from quire_engine.api.schemas import UNSUPPORTED, CompletionRequest, remove_unsupported
from quire_engine.errors import BodyTooLarge, InvalidRequest, RequestError, Unavailable, UnsupportedMedia

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def request_with(body: bytes, content_type: str = "application/json", **headers: str) -> Request:
    parts = [body[i : i + 7] for i in range(0, len(body), 7)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1} for index, part in enumerate(parts)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    raw = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request(
        {"type": "http", "method": "POST", "headers": [(k.encode(), v.encode()) for k, v in raw.items()]}, receive
    )


async def read_object(request: Request, max_bytes: int, budget: BodyBudget | None = None) -> dict[str, Any]:
    with (budget or BodyBudget(2**28)).lease() as held:
        return await body_module.read_object(request, max_bytes, held)


async def test_body_may_arrive_in_parts() -> None:
    assert await read_object(request_with(json.dumps(CHAT).encode()), 1000) == CHAT


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "an array"),
        (b"null", "null"),
    ],
)
async def test_body_that_is_not_a_json_object_is_refused(body: bytes, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        await read_object(request_with(body), 10**6)
    assert caught.value.code == "invalid_json" and len(error_body(caught.value)) <= 4096


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\ud83d", "\ufffd"),
        (r"cut \uD83D end", "cut \ufffd end"),
        (r"\ude00\ud83d\ude00\ud83d", "\ufffd\U0001f600\ufffd"),
        (r"\\ud83d \ud83d", r"\ud83d " + "\ufffd"),
        (r"\ud83d\n\u00e9", "\ufffd\né"),
    ],
)
async def test_half_a_surrogate_pair_becomes_a_replacement_character(text: str, value: str) -> None:
    assert await read_object(request_with(f'{{"a": "{text}"}}'.encode()), 1000) == {"a": value}


def large(text: str) -> Request:
    messages = [{"type": "http.request", "body": text.encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [' + ",".join(["{}"] * 150_000) + "]}",
        '{"a": [' + ",".join(["[[[[]]]]"] * 50_000) + "]}",
        '{"a": {"b": [' + ",".join(['"x"'] * 250_000) + "]}}",
        '{"prompt": [' + ",".join(["1"] * 300_000) + "]}",
        '{"prompt": [' + ",".join(["[]"] * 150_000) + "]}",
    ],
)
async def test_more_values_than_any_request_needs_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await read_object(large(text), 2**23)
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": '[{,\\"' * 60_000},
        {"messages": [{"role": "user", "content": 'if (a[i], b) { say("x\\n"); }' * 10_000}], "n": 2},
        {"prompt": 'say("x", [1]); ' * 150_000},
        {"prompt": [5] * 200_000},
        {"prompt": [[7] * 4_000] * 50, "max_tokens": 1},
        {"tokens": [7] * 150_000, "model": "é"},
    ],
)
async def test_large_body_is_parsed_like_a_small_one(content: dict[str, Any]) -> None:
    assert await read_object(large(json.dumps(content)), 2**23) == content


async def test_all_bodies_share_one_budget() -> None:
    budget = BodyBudget(100)
    with budget.lease() as first, budget.lease() as second:
        first.add(60)
        with pytest.raises(Unavailable) as caught:
            second.add(41)
        assert caught.value.code == "too_many_bodies" and caught.value.retry_after_seconds
        second.add(40)
        assert budget.held == 100
    assert budget.held == 0
    with pytest.raises(Unavailable):
        await read_object(request_with(b"{}" * 51), 1000, budget)
    assert budget.held == 0


def test_large_bodies_leave_room_for_small_ones() -> None:
    budget = BodyBudget(8 * SMALL_BYTES)
    with budget.lease() as slow, budget.lease() as other, budget.lease() as small:
        for _ in range(6):
            slow.add(SMALL_BYTES)
        with pytest.raises(Unavailable):
            other.add(SMALL_BYTES + 1)
        small.add(SMALL_BYTES)
    with budget.lease() as again:
        again.add(6 * SMALL_BYTES)


async def test_body_over_the_limit_without_content_length_is_refused() -> None:
    with pytest.raises(BodyTooLarge):
        await read_object(request_with(b"x" * 101), 100)
    with pytest.raises(BodyTooLarge):
        await read_object(request_with(b"", content_length="101"), 100)


@pytest.mark.parametrize(
    ("content_type", "headers"),
    [
        ("text/plain", {}),
        ("application/x-www-form-urlencoded", {}),
        ("", {}),
        ("application/json", {"content_encoding": "gzip"}),
    ],
)
async def test_other_media_are_refused(content_type: str, headers: dict[str, str]) -> None:
    with pytest.raises(UnsupportedMedia):
        await read_object(request_with(b"{}", content_type, **headers), 100)


def refusal(model: type[Any], content: dict[str, Any], *, lenient: bool = False) -> InvalidRequest:
    content = json.loads(json.dumps(content))
    with pytest.raises(InvalidRequest) as caught:
        validate_body(model, content, lenient=lenient, reasons=remove_unsupported(content, model.model_fields))
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "place", "figures"),
    [
        ("temperature", "hot", "temperature: ", ("number",)),
        ("temperature", "0.5", "temperature: ", ("number",)),
        ("temperature", -1, "temperature: ", ("0",)),
        ("temperature", True, "temperature: ", ("number",)),
        ("top_p", 0, "top_p: ", ("0",)),
        ("max_tokens", -1, "max_tokens: ", ("greater",)),
        ("max_tokens", 1.5, "max_tokens: ", ("integer",)),
        ("n", 0, "n: ", ("greater",)),
        ("n", 10**6, "n: ", ("128",)),
        ("seed", 2**64, "seed: ", ("less",)),
        ("stream", "yes", "stream: ", ("boolean",)),
        ("stop", 3, "stop: ", ("integer",)),
        ("stop", [""], "stop: ", ("1",)),
        ("stop", ["x"] * 17, "stop: ", ("17",)),
        ("stop", "x" * 257, "stop: ", ("256",)),
        ("stop_token_ids", [-1], "stop_token_ids[0]: ", ("0",)),
        ("logit_bias", {"x": 1}, "logit_bias: ", ("'x'",)),
        ("logit_bias", {"1": 101}, "logit_bias: ", ("-100", "100")),
        ("logit_bias", [1], "logit_bias: ", ("object",)),
        ("stream_options", {"include_usage": True}, "stream_options: ", ("stream",)),
        ("min_token", 3, "min_token: ", ("min_tokens",)),
        ("guided_json", 3, "guided_json: ", ("integer",)),
        ("guided_choice", [], "guided_choice: ", ("1",)),
        ("prompt_logprobs", -1, "prompt_logprobs: ", ("0",)),
        ("prompt_logprobs", True, "prompt_logprobs: ", ("integer",)),
        ("typical_p", 0, "typical_p: ", ("0",)),
        ("typical_p", 1.5, "typical_p: ", ("1",)),
        ("allowed_token_ids", [], "allowed_token_ids: ", ("array",)),
        ("allowed_token_ids", [1] * 10_001, "allowed_token_ids: ", ("10001", "10000")),
        ("allowed_token_ids", [3, -1], "allowed_token_ids: ", ("token ids",)),
        ("allowed_token_ids", [3, True], "allowed_token_ids: ", ("token ids",)),
        ("bad_words", ["a", ""], "bad_words[1]: ", ("1",)),
        ("bad_words", ["a"] * 257, "bad_words: ", ("256",)),
        ("bad_words", "a", "bad_words: ", ("list",)),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens: ", ("-1", "0")),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens: ", ("-1",)),
        ("cache_salt", "", "cache_salt: ", ("1",)),
    ],
)
def test_a_wrong_field_is_named_on_both_routes(field: str, value: Any, place: str, figures: tuple[str, ...]) -> None:
    for model, content in ((ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)):
        error = refusal(model, {**content, field: value})
        assert error.message.startswith(place) and error.param == field
        assert all(figure in error.message for figure in figures), error.message


@pytest.mark.parametrize(
    ("content", "place", "figures"),
    [
        ({"model": "m"}, "messages", ("required",)),
        ({**CHAT, "max_tokens": 0}, "max_tokens", ("1",)),
        ({**CHAT, "best_of": 2}, "best_of", ("use n",)),
        ({**CHAT, "messages": []}, "messages", ("1",)),
        ({**CHAT, "messages": "Hi"}, "messages", ("list",)),
        ({**CHAT, "messages": [{"role": "user"}]}, "messages[0]", ("content",)),
        ({**CHAT, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role", ("'system'",)),
        ({**CHAT, "messages": [{"role": "user", "content": 3}]}, "messages[0].content", ("array",)),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            ("0", "'image_url'"),
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content",
            ("0",),
        ),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools[0].function", ("required",)),
        ({**CHAT, "functions": [{"name": "f"}]}, "functions", ("not supported",)),
        ({**CHAT, "response_format": 3}, "response_format", ("dictionary",)),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format", ("json_schema.schema",)),
        ({**CHAT, "response_format": {"type": "structural_tag"}}, "response_format", ("format",)),
        ({**CHAT, "structured_outputs": {}}, "structured_outputs", ("exactly one",)),
        (
            {**CHAT, "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            ("regex and choice", "exactly one"),
        ),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", ("logprobs",)),
        ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", ("max_tokens",)),
        ({**CHAT, "continue_final_message": True}, "continue_final_message", ("add_generation_prompt",)),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ("messages",)),
    ],
)
def test_a_wrong_chat_request_is_explained(content: dict[str, Any], place: str, figures: tuple[str, ...]) -> None:
    error = refusal(ChatCompletionRequest, content)
    assert error.message.startswith(f"{place}: ") and error.param == place.partition("[")[0]
    assert all(figure in error.message for figure in figures), error.message


@pytest.mark.parametrize(
    ("change", "place", "figures"),
    [
        ({"prompt": []}, "prompt", ("array",)),
        ({"prompt": [[]]}, "prompt", ("token ids",)),
        ({"prompt": [1, "a"]}, "prompt", ("mixes",)),
        ({"prompt": [[1, -2]]}, "prompt", ("token ids",)),
        ({"prompt": None}, "prompt", ("string",)),
        ({"suffix": "end"}, "suffix", ("not supported",)),
        ({"logit_bias": {str(i): 1 for i in range(10_001)}}, "logit_bias", ("10001", "10000")),
        ({"best_of": 2}, "best_of", ("use n",)),
        ({"best_of": 2, "n": 2, "stream": True}, "best_of", ("use n",)),
    ],
)
def test_a_wrong_completion_request_is_explained(change: dict[str, Any], place: str, figures: tuple[str, ...]) -> None:
    error = refusal(CompletionRequest, {**COMPLETION, **change})
    assert error.message.startswith(f"{place}: ") and error.param == place
    assert all(figure in error.message for figure in figures), error.message


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_have_four_forms(prompt: Any, prompts: Any) -> None:
    assert validate_body(CompletionRequest, {"model": "m", "prompt": prompt}, lenient=False).prompt == prompts


def test_schema_forbids_truncation_to_zero_tokens() -> None:
    described = CompletionRequest.model_json_schema()["properties"]["truncate_prompt_tokens"]["anyOf"]
    assert described == [{"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]}, {"type": "null"}]


def test_null_echo_means_false() -> None:
    body = validate_body(CompletionRequest, {"model": "m", "prompt": "a", "echo": None}, lenient=False)
    assert not body.echo


def test_fields_without_an_effect_are_accepted() -> None:
    nothing = {
        **{name: None for name in UNSUPPORTED},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": True,
        "metadata": {"a": "b"},
        "user": "ann",
        "service_tier": "auto",
        **{
            name: None
            for name in ChatCompletionRequest.model_fields
            if ChatCompletionRequest.model_fields[name].default is None
        },
    }
    content = {**nothing, **CHAT}
    assert remove_unsupported(content, ChatCompletionRequest.model_fields) == []
    validate_body(ChatCompletionRequest, content, lenient=False)


def test_at_most_ten_problems_are_reported_at_once() -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "functions": [1], "top_p": 3, "n": "x", "colour": "red"})
    assert [reason.partition(":")[0] for reason in error.message.split("; ")] == ["functions", "top_p", "n", "colour"]
    many = refusal(ChatCompletionRequest, {**CHAT, **{f"field{number}": 1 for number in range(50)}})
    assert len(many.message.split("; ")) == 10 and many.message.endswith("and 41 more")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**CHAT, **{f"f{number}": 1 for number in range(255)}}, "has 257 fields; at most 256"),
        ({**CHAT, "messages": [{f"f{number}": 1 for number in range(257)}]}, "messages[0]: has 257 fields"),
        ({**CHAT, "messages": [{}] * 10_001}, "messages: should have at most 10000 items"),
    ],
)
def test_number_of_reported_problems_is_bounded(content: dict[str, Any], reason: str) -> None:
    assert refusal(ChatCompletionRequest, content).message.startswith(reason)


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.integers(), min_size=1))
def test_a_large_invalid_body_gets_a_small_response(content: dict[str, Any]) -> None:
    error = refusal(ChatCompletionRequest, {**content, "messages": [{"role": "é" * 500, "€" * 9000: 1}] * 20})
    body = error_body(error)
    assert len(body) <= 4096 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_lenient_drops_and_logs_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    content = {**CHAT, "colour": "red", "messages": [{"role": "user", "content": "Hi"}]}
    made = validate_body(ChatCompletionRequest, content, lenient=True)
    assert made.messages == [{"role": "user", "content": "Hi"}]
    assert [record.args for record in caplog.records] == [("colour",)]


def test_lenient_still_refuses_wrong_values() -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "colour": "red", "n": "x"}, lenient=True)
    assert error.message.startswith("n: ") and "colour" not in error.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED})


@given(st.dictionaries(st.sampled_from(fields), json_values, max_size=5), st.booleans())
def test_any_body_is_parsed_or_rejected(change: dict[str, Any], lenient: bool) -> None:
    for model, content in ((ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)):
        body = {**content, **change}
        try:
            validate_body(model, body, lenient=lenient, reasons=remove_unsupported(body, model.model_fields))
        except RequestError as error:
            assert len(error_body(error)) <= 4096
