"""Every kind of server error is detected and described."""

import asyncio

import pytest
from aiohttp import web

from e2e_support.traffic.answer import Form
from e2e_support.traffic.fake_server import CHAT, PROMPT, begin, right_events, whole, written
from e2e_support.traffic.result import FailureKind

WRONG, BROKEN, ERROR_EVENT = FailureKind.WRONG, FailureKind.BROKEN, FailureKind.ERROR_EVENT
DONE = "data: [DONE]\n\n"
ERROR = 'event: error\ndata: {"error": {"code": "replica_failed", "message": "it died"}}\n\n'


def edited(number, **changes):
    """Return events in which the event of that number has another choice."""

    def twist(events):
        choice = events[number]["choices"][0] | changes
        return [*events[:number], events[number] | {"choices": [choice]}, *events[number + 1 :]]

    return twist


def with_usage(**changes):
    return lambda events: [*events[:-2], events[-2] | {"usage": events[-2]["usage"] | changes}, events[-1]]


def said_short(events):
    """Return events whose text ends early, with all parts of a regular end."""
    return [*events[:2], *edited(0, finish_reason="length")(events[2:3]), *events[-2:]]


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["completion", "chat"])
async def test_correct_response_passes_in_every_form(ask, prompt, form):
    record = await ask(prompt, form)
    assert record.failure is None
    assert record.replica == "llm/chat-0"
    assert len(record.chunk_times) == (1 if form is Form.WHOLE else 7)


TWISTS = {
    "a text that ends early, but says that it is whole": (
        said_short,
        "finish_reason 'length' of a text cut short, 19 of",
    ),
    "a wrong word": (
        edited(2, text="clause "),
        "chunk 2: at character 9 expected 'statement wraps a block.', got 'clause ",
    ),
    "a chunk twice": (lambda e: [*e[:3], e[2], *e[3:]], "(the piece before, again)"),
    "a chunk left out": (lambda e: [*e[:2], *e[3:]], "(which comes 10 characters later: a piece is missing)"),
    "an end of its own making": (edited(6, finish_reason="stop"), "finish_reason 'stop' instead of 'length', 33 of 33"),
    "no finish_reason": (edited(6, finish_reason=None), "usage before finish_reason, 33 of 33 characters"),
    "text after the end": (
        lambda e: [*e[:7], *edited(0, text="!")(e[6:7]), *e[7:]],
        "another chunk after finish_reason",
    ),
    "more than the end": (edited(6, text=". And"), "text beyond the expected end at character 33: ' And'"),
    "no [DONE]": (lambda e: e[:-1], "the stream ended without [DONE], 33 of 33 characters received"),
    "[DONE] in the middle": (
        lambda e: [*e[:3], DONE],
        "it ended without a finish_reason, 19 of 33 characters received",
    ),
    "an event after [DONE]": (lambda e: [*e, e[0]], "an event after [DONE]"),
    "[DONE] after an error": (lambda e: [*e[:3], ERROR, DONE], "an event after the error event"),
    "half an event": (lambda e: [*e[:3], 'data: {"choi'], "half an event at the end"),
    "no JSON": (lambda e: [*e[:3], "data: {oops\n\n"], "no JSON"),
    "no usage": (lambda e: [*e[:-2], e[-1]], "it ended without usage"),
    "usage twice": (lambda e: [*e[:-1], *e[-2:]], "usage was reported twice"),
    "too few tokens in usage": (with_usage(completion_tokens=6), "usage.completion_tokens 6 instead of 7"),
    "another prompt's usage": (with_usage(prompt_tokens=9), "usage.prompt_tokens 9 instead of 5"),
    "another's chunk": (lambda e: [*e[:3], e[3] | {"id": "cmpl-2"}, *e[4:]], "id 'cmpl-2' in the stream of 'cmpl-1'"),
    "two choices": (lambda e: [e[0] | {"choices": e[0]["choices"] * 2}, *e[1:]], "expected one choice or none"),
}


@pytest.mark.parametrize(("twist", "words"), TWISTS.values(), ids=TWISTS)
async def test_wrong_stream_is_detected(server, ask, twist, words):
    server.twist = twist
    record = await ask()
    assert record.failure is not None, "taken for right"
    assert record.failure.kind is WRONG
    assert words in record.failure.message


TOKEN_TWISTS = {
    "another token of the same text": (edited(3, token_ids=[7]), "chunk 3, token 3 of 7: expected 103, got 7"),
    "a token twice": (edited(3, token_ids=[103, 103]), "chunk 3, token 4 of 7: expected 104, got 103"),
    "one token too few": (edited(6, token_ids=[]), "finish_reason 'length' after 6 of 7 tokens"),
    "one token too many": (edited(6, token_ids=[106, 107]), "chunk 6, token 7 of 7: expected none, got 107"),
    "no tokens": (edited(3, token_ids=None), "chunk 3: no token_ids, though they were asked for"),
}


@pytest.mark.parametrize(("twist", "words"), TOKEN_TWISTS.values(), ids=TOKEN_TWISTS)
async def test_wrong_tokens_with_correct_text_are_detected(server, ask, twist, words):
    server.twist = twist
    assert (await ask(form=Form.STREAM)).ok
    record = await ask(form=Form.STREAM_TOKENS)
    assert record.failure is not None, "taken for right"
    assert (record.failure.kind, record.failure.message) == (WRONG, words)


async def test_tokens_beyond_known_ones_are_counted_not_compared(server, ask):
    def longer(events):
        said = edited(6, finish_reason=None)(events)
        more = edited(0, text=" More", token_ids=[7])(events[:1]) * 2
        last = edited(0, text=".", token_ids=[8], finish_reason="length")(events[:1])
        return [*said[:7], *more, *last, *with_usage(completion_tokens=10, total_tokens=15)(events)[-2:]]

    server.twist = longer
    assert (await ask(form=Form.STREAM_TOKENS, beyond=3)).failure is None
    assert server.bodies[-1]["max_tokens"] == 10 and server.bodies[-1]["ignore_eos"] is True
    too_short = await ask(form=Form.STREAM_TOKENS, beyond=4)
    assert too_short.failure.message == "finish_reason 'length' after 10 of 11 tokens"
    too_long = await ask(form=Form.STREAM_TOKENS, beyond=2)
    assert too_long.failure.message == "chunk 9, token 9 of 9: expected none, got 8"
    server.twist = lambda events: edited(2, text="clause ")(longer(events))
    assert "at character 9 expected" in (await ask(form=Form.STREAM_TOKENS, beyond=3)).failure.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"choices": []}, "expected one choice"),
        ({"usage": None}, "no usage, though it was asked for"),
        ({"choices": [{"text": "The wand ", "finish_reason": "length"}]}, "at character 5 expected"),
        ({"choices": [{"text": "The with ", "finish_reason": "length"}]}, "of a text cut short, 9 of 33"),
        ({"choices": [{"text": PROMPT.answer, "finish_reason": None}]}, "usage before finish_reason"),
    ],
)
async def test_wrong_unstreamed_response_is_detected(server, ask, changes, words):
    async def answer(request):
        return web.json_response(whole(await request.json()) | changes)

    server.handler = answer
    record = await ask(form=Form.WHOLE)
    assert record.failure.kind is WRONG
    assert words in record.failure.message


async def test_error_event_is_reported_with_its_message(server, ask):
    server.twist = lambda events: [*events[:3], ERROR]
    record = await ask()
    assert (record.failure.kind, record.failure.message) == (ERROR_EVENT, "replica_failed: it died")
    assert len(record.chunk_times) == 3


async def test_an_error_event_before_a_reset_is_still_an_error_event(server, ask):
    reset_after_three(server, [ERROR])
    assert (await ask()).failure.kind is ERROR_EVENT


async def test_a_reset_connection_is_broken(server, ask):
    reset_after_three(server, [])
    record = await ask()
    assert record.failure.kind is BROKEN
    assert "after 3 chunks" in record.failure.message


def reset_after_three(server, last):
    async def answer(request):
        events = right_events(await request.json())
        response = await begin(request)
        for event in [*events[:3], *last]:
            await response.write(written(event))
            await asyncio.sleep(0.02)
        request.transport.abort()
        return response

    server.handler = answer


async def test_stall_is_detected(server, ask):
    async def answer(request):
        response = await begin(request)
        await response.write(written(right_events(await request.json())[0]))
        while request.transport is not None:
            await asyncio.sleep(0.01)
        return response

    server.handler = answer
    record = await ask(silence_seconds=1.0)
    assert record.failure.kind is FailureKind.STALLED
    assert record.failure.message == "nothing came for 1 s after 1 chunks"


async def test_http_error_is_reported_with_its_message(server, ask):
    async def answer(request):
        return web.json_response({"error": {"message": "the engine is starting"}}, status=503)

    server.handler = answer
    record = await ask()
    assert (record.failure.kind, record.failure.status) == (FailureKind.STATUS, 503)
    assert "the engine is starting" in record.failure.message


async def test_response_that_is_not_a_stream_is_wrong(server, ask):
    async def answer(request):
        return web.json_response(whole(await request.json()))

    server.handler = answer
    assert (await ask()).failure.message == "asked for a stream, got application/json"


async def test_closed_port_is_unreachable(server, ask):
    server.url = "http://127.0.0.1:9"
    record = await ask()
    assert (record.failure.kind, record.replica) == (FailureKind.UNREACHABLE, None)
