"""The HTTP response that streams a generation, and the one that waits for its end.

A stream can be one that another engine continues after this one's death.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from secrets import randbits
from struct import pack
from time import time
from typing import Any, Protocol, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_common.contract.engine import (
    RESUMABLE_HEADER,
    RESUME_COMMENT,
    RESUME_FIELD,
    TOKENS_COMMENT,
    USAGE_COMMENT,
    USAGE_HEADER,
)
from quire_engine.api.generation import ClientGone, Generation
from quire_engine.api.output import Choice, Collected, Delta
from quire_engine.api.problems import error_body
from quire_engine.api.schemas import StreamOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InternalError, InvalidRequest, RequestError

_log = logging.getLogger(__name__)


DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""A line that clients ignore; proxies see that the connection is alive."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers the stream
}

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """Return one event. JSON escapes line breaks, so a payload is always one data line."""
    return b"data: " + _encode(payload) + b"\n\n"


def comment(start: bytes, payload: Any) -> bytes:
    """Return a comment, which clients ignore."""
    return start + _encode(payload) + b"\n\n"


class TextEvent:
    """An event in which only one text changes from token to token: everything around it is encoded once."""

    def __init__(self, payload_of: Callable[[str], Any]) -> None:
        # No other string in an answer contains such characters: names and ids are printable.
        place = "\x00text\x00"
        self._head, found, self._tail = event(payload_of(place)).partition(_encode(place))
        assert found, "the payload does not contain the text"

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return b"%b%b%b" % (self._head, _encode(text), self._tail)


def error_event(error: RequestError) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


class UsageReport:
    """The usage of one request with ``per_prompt`` answers to each prompt; a prompt counts once for all of them."""

    def __init__(self, choices: Sequence[Choice], per_prompt: int, options: StreamOptions | None) -> None:
        self._choices = choices
        self._firsts = choices[::per_prompt]
        self._at_end = bool(options and options.include_usage)
        self.reasoning_tokens: Callable[[], int] | None = None
        """The number of tokens of reasoning so far, if the model's format of reasoning has tags that can be counted."""
        self.in_every_chunk = bool(options and options.continuous_usage_stats)

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        prompt = sum(len(choice.prompt_token_ids) for choice in self._firsts)
        completion = sum(choice.num_tokens for choice in self._choices)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in self._firsts)},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens()}
        return counts

    def chunk_fields(self) -> dict[str, Any]:
        """Return the fields of a chunk that concern the usage: none, unless the request asks for them."""
        if self.in_every_chunk:
            return {"usage": self.usage()}
        return {"usage": None} if self._at_end else {}

    def last_events(self, head: dict[str, Any]) -> bytes:
        """Return the end of a stream, with the total usage in a chunk without answers if the request asks for it."""
        if not self._at_end:
            return DONE
        return event({**head, "choices": [], "usage": self.usage()}) + DONE


_REFUSED = "not_resumable"
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
"""The routes of such streams. The ids of a response and its items are random, so that another engine cannot go on."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that continue a stream; a gateway stores all but the tokens as they are."""

    seed: int
    created: int
    """The time of the first attempt in Unix seconds, which all chunks of an answer repeat."""
    prompt: str
    """A digest of the token ids of the prompt, which must be the same."""
    token_ids: list[int] = []
    """The tokens whose events the client has."""


def take_resumption(request: Request, content: dict[str, Any]) -> Resumption | None:
    """Remove the field of a gateway from a body and return its value. Raise InvalidRequest if it is malformed.

    Without the header of a gateway, the field is unknown and stays.
    """
    if RESUMABLE_HEADER not in request.headers or RESUME_FIELD not in content:
        return None
    try:
        return msgspec.convert(content.pop(RESUME_FIELD), Resumption)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{RESUME_FIELD}: {error}", param=RESUME_FIELD) from error


def obstacle(path: str, choices: Sequence[Choice], params: SamplingParams) -> str | None:
    """Return the property of a request for which its stream cannot be continued elsewhere; None if it can."""
    if path not in _PATHS:
        return f"an answer of {path}"
    if len(choices) > 1:
        return "several answers"
    if params.logprobs is not None:
        return "logprobs"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    if params.reasoning_phase is not None:
        return "a budget of reasoning"
    return None if params.grammar is None else "a grammar"


def checked(
    path: str, resumption: Resumption, choices: Sequence[Choice], params: SamplingParams, *, vocab_size: int
) -> None:
    """Raise InvalidRequest if the stream cannot be continued here."""
    reason = obstacle(path, choices, params)
    ids = resumption.token_ids
    if reason is not None:
        message = f"a stream with {reason} cannot be continued"
    elif resumption.prompt != digest_of(choices[0].prompt_token_ids):
        message = "the prompt has other tokens here; continue the stream on an engine with the same model and template"
    elif len(ids) >= params.max_tokens:
        message = f"{len(ids)} tokens leave none of the {params.max_tokens} that the answer may have"
    elif any(not 0 <= id_ < vocab_size for id_ in ids):
        message = f"a token id is not below {vocab_size}"
    elif not -(2**63) <= resumption.seed < 2**63:
        message = "the seed is not an integer of 64 bits"
    else:
        return
    raise InvalidRequest(f"{RESUME_FIELD}: {message}", param=RESUME_FIELD, code=_REFUSED)


def started(prompt_token_ids: Sequence[int], seed: int | None) -> Resumption:
    """Return the facts of a stream that starts now."""
    return Resumption(
        seed=randbits(63) if seed is None else seed, created=int(time()), prompt=digest_of(prompt_token_ids)
    )


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest of token ids."""
    return blake2b(pack(f"<{len(token_ids)}q", *token_ids), digest_size=16).hexdigest()


class TokenMarks:
    """The comments of one stream that a gateway keeps: the facts at its start, and the tokens after their events."""

    def __init__(self, resumption: Resumption) -> None:
        self._start = resumption
        self._ids: list[int] = []

    def start(self) -> bytes:
        """Return the first comment."""
        facts = msgspec.structs.replace(self._start, token_ids=[])
        return comment(RESUME_COMMENT, facts)

    def mark(self, deltas: Sequence[Delta], events: bytes) -> bytes:
        """Return the comment after the events of these deltas; deltas without an event wait for the next one."""
        for delta in deltas:
            self._ids += delta.token_ids
        if not events:
            return b""
        ids, self._ids = self._ids, []
        return comment(TOKENS_COMMENT, ids)


_SEND_TIMEOUT_SECONDS = 60.0
"""The server treats a client that reads nothing for this time as gone. Until then its tokens wait as ids, not text."""

_JSON = "application/json"
MAX_LOGPROBS_HELD = 500_000
"""The most logprobs in an answer that is not streamed: about 30 MB of JSON, and ten times that while encoding."""
_MANY_LOGPROBS = 10_000
_MANY_TOKENS = 50_000
"""An answer with more logprobs or tokens is encoded in a thread, so that the event loop can serve others meanwhile."""


class Writer(Protocol):
    """The format in which one route writes answers."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta."""

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""

    def last(self, choices: list[Choice]) -> bytes:
        """Return the events after the last delta of a successful generation."""

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed; each choice has its whole answer as one delta."""


class DisconnectWatch:
    """A task that calls ``on_disconnect`` once the client has closed the connection.

    The body of the request must have been read completely before.
    """

    def __init__(self, request: Request, on_disconnect: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._watch(request, on_disconnect))

    async def _watch(self, request: Request, on_disconnect: Callable[[], None]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    def stop(self) -> None:
        """Watch no longer."""
        self._task.cancel()


async def respond(
    request: Request, generation: Generation, writer: Writer, *, stream: bool, keepalive_seconds: float | None
) -> Response:
    """Return the response of a generation. Raises RequestError, ClientGone as long as nothing has been sent.

    A stream without output begins after ``keepalive_seconds``, and has a comment whenever it had no event for so long.
    """
    watch = DisconnectWatch(request, generation.abandon)
    headers: dict[str, str] = request.state.answer_headers
    resumption: Resumption | None = request.state.resumption
    handed_over = False
    first = asyncio.ensure_future(generation.first())
    try:
        if resumption is not None:
            _replay(resumption, generation, writer)
        if stream and keepalive_seconds is not None:
            await asyncio.wait({first}, timeout=keepalive_seconds)
        else:
            await first
        if first.done():
            first.result()
        if stream:
            handed_over = True
            return _EventStream(
                generation,
                writer,
                first,
                watch,
                headers,
                keepalive_seconds,
                tells_usage=USAGE_HEADER in request.headers,
                marks=None if resumption is None else TokenMarks(resumption),
            )
        return Response(await collect_whole(generation, writer, first.result()), media_type=_JSON, headers=headers)
    finally:
        if not handed_over:
            first.cancel()
            watch.stop()
            generation.close()


def _replay(resumption: Resumption, generation: Generation, writer: Writer) -> None:
    """Bring an answer to where another engine left it. Raise InvalidRequest if it ended there."""
    if not resumption.token_ids:
        return
    (choice,) = generation.choices
    delta = choice.append_tokens(resumption.token_ids, None, None)
    if choice.finish_reason is not None:
        raise InvalidRequest(f"{RESUME_FIELD}: the tokens end the answer", param=RESUME_FIELD, code="not_resumable")
    if delta is not None:
        # The client has its events. Writing them brings the writer to the same state.
        writer.chunk(delta)


async def collect_whole(generation: Generation, writer: Writer, first: list[Delta]) -> bytes:
    """Return the body of an answer in one piece, when it is complete. Raises RequestError, ClientGone."""
    choices = generation.choices
    collected = [Collected(choice.index) for choice in choices]
    held = 0
    async for more in _with_first(first, generation):
        for delta in more:
            collected[delta.index].add(delta)
        held += _num_logprobs(more)
        if held > MAX_LOGPROBS_HELD:
            raise InvalidRequest(
                f"stream: an answer that is not streamed has at most {MAX_LOGPROBS_HELD} logprobs, and this one has "
                "more; set stream to true, or request fewer logprobs",
                param="stream",
                code="answer_too_large",
            )
    answers = [each.whole() for each in collected]
    num_logprobs = held + sum([len(choice.prompt_logprobs) for choice in choices])
    if num_logprobs > _MANY_LOGPROBS or sum([choice.num_tokens for choice in choices]) > _MANY_TOKENS:
        return await asyncio.to_thread(writer.whole, choices, answers)
    return writer.whole(choices, answers)


async def _with_first(first: list[Delta], generation: Generation) -> AsyncIterator[list[Delta]]:
    yield first
    async for deltas in generation.deltas():
        yield deltas


def _num_logprobs(deltas: list[Delta]) -> int:
    return sum([len(one.token_ids) for delta in deltas for one in delta.logprobs])


class _EventStream(Response):
    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        first: asyncio.Future[list[Delta]],
        watch: DisconnectWatch,
        headers: dict[str, str],
        keepalive_seconds: float | None,
        *,
        tells_usage: bool,
        marks: TokenMarks | None,
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        self._keepalive_seconds = keepalive_seconds
        self._tells_usage = tells_usage
        self._marks = marks
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._first = first
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(None) as deadline:
                with _PatientSender(send, deadline) as sender:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    # A task of its own: a token then wakes this one coroutine, not all those that led here.
                    sending = asyncio.create_task(self._send_events(sender))
                    if not self._first.done():
                        await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                    if self._keepalive_seconds is not None:
                        keeping = asyncio.create_task(sender.keep_alive(self._keepalive_seconds))
                        sending.add_done_callback(lambda _: keeping.cancel())
                    await sending
        except (ClientGone, TimeoutError):
            _log.info("client disconnected: its request is ended")
        finally:
            self._first.cancel()
            self._watch.stop()
            self._generation.close()

    async def _send_events(self, sender: "_PatientSender") -> None:
        chunk = self._writer.chunk
        try:
            marks = self._marks
            deltas = await self._first
            events = b"".join([chunk(delta) for delta in deltas])
            await sender.send(events if marks is None else marks.start() + events + marks.mark(deltas, events))
            async for deltas in self._generation.deltas():
                # A parser may hold back the text of a delta.
                events = b"".join([chunk(delta) for delta in deltas])
                if marks is not None:
                    events += marks.mark(deltas, events)
                if events:
                    await sender.send(events)
            usage = comment(USAGE_COMMENT, self._writer.usage()) if self._tells_usage else b""
            await sender.send(usage + self._writer.last(self._generation.choices), more=False)
        except RequestError as failure:
            await sender.send(self._writer.failed(failure))
        except (ClientGone, TimeoutError):
            raise
        except Exception:
            _log.exception("stream aborted: internal error")
            error = InternalError("internal server error; the server's log has the details")
            await sender.send(self._writer.failed(error))


class _PatientSender:
    """A sender of the parts of one body that ends ``deadline`` once the client has not read a part for too long.

    One timer per stream checks from time to time whether a send is blocked: a timer around each send would cost as
    much as the text of the token.
    """

    CHECKS = 4

    def __init__(self, send: Send, deadline: asyncio.Timeout) -> None:
        self._send = send
        self._deadline = deadline
        self._sending = False
        self._num_sent = 0
        self._ended = False
        self._blocked_checks = 0
        """The number of checks that have found the current send blocked."""

    def __enter__(self) -> Self:
        self._schedule_check()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send one part of the body."""
        self._num_sent += 1
        self._ended = not more
        self._blocked_checks = 0
        self._sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment whenever nothing was sent for ``seconds``, until the last part."""
        while True:
            before = self._num_sent
            await asyncio.sleep(seconds)
            if self._num_sent == before and not self._sending and not self._ended:
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SEND_TIMEOUT_SECONDS / self.CHECKS, self._check)

    def _check(self) -> None:
        self._blocked_checks = self._blocked_checks + 1 if self._sending else 0
        if self._blocked_checks > self.CHECKS:
            self._deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._schedule_check()
