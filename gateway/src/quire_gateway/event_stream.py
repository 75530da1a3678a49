"""Streams of events: relayed as whole events, started with comments while a request waits, continued elsewhere."""

import asyncio
import re
from array import array
from contextlib import suppress
from typing import Annotated

import msgspec
from aiohttp import web

from quire_common.contract.engine import RESUME_COMMENT, RESUME_FIELD, TOKENS_COMMENT
from quire_common.contract.gateway import WAIT_COMMENTS_HEADER
from quire_gateway import headers
from quire_gateway.bodies import Body
from quire_gateway.errors import error_code

_MAX_EVENT_BYTES = 2**18
"""The most of an incomplete event that waits for its rest; a longer one is forwarded in pieces."""
_OVERLAP = 3
"""The most bytes of an event's end that an earlier chunk may have brought."""

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Content-Type": f"{CONTENT_TYPE}; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of a stream that begins before its replica has answered."""
EVENT_END = b"\n\n"
"""The end of an event as engines write it."""
_ERROR_EVENT = b"event: error\n"


class EventSplitter:
    """A buffer that splits a stream where events end."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.error: bytes | None = None
        """The data of the error event that has ended the stream, perhaps without its end; nothing may follow it."""

    def feed(self, chunk: bytes) -> bytes:
        """Return all events that are complete with this chunk."""
        if not self._rest and chunk.endswith((b"\n\n", b"\r\n\r\n")):
            return self._checked(chunk)
        # Only what is new is searched, so that an event in many small chunks costs no more than one in a large chunk.
        new = max(0, len(self._rest) - _OVERLAP)
        self._rest += chunk
        lf, crlf = self._rest.rfind(b"\n\n", new), self._rest.rfind(b"\r\n\r\n", new)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        return self._take(len(self._rest) if len(self._rest) - end > _MAX_EVENT_BYTES else end)

    def flush(self) -> bytes:
        """Return what follows the last complete event, at the regular end of the stream."""
        return self._take(len(self._rest))

    def _take(self, end: int) -> bytes:
        data = bytes(self._rest[:end])
        del self._rest[:end]
        return self._checked(data)

    def _checked(self, data: bytes) -> bytes:
        if data.startswith(_ERROR_EVENT) or b"\n" + _ERROR_EVENT in data:
            self.error = data.rpartition(_ERROR_EVENT)[2].removeprefix(b"data: ")
        return data


def error_event(body: bytes) -> bytes:
    """Return the event for an error within a stream; no ``[DONE]`` follows it."""
    return b"event: error\ndata: " + body + b"\n\n"


_COMMENT = b": waiting for a replica\n\n"
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 300.0


def wait_seconds(request: web.Request, *, is_stream: bool, usual_seconds: float) -> float | None:
    """Return the time between two comments; None if the answer is no stream, or if the time is 0."""
    try:
        seconds = float(request.headers.get(WAIT_COMMENTS_HEADER, usual_seconds))
    except ValueError:
        seconds = usual_seconds
    if not is_stream or not seconds > 0:
        return None
    return min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS)


class WaitComments:
    """The comments of one waiting stream."""

    def __init__(self, request: web.Request, seconds: float, *, request_id: str) -> None:
        self._request, self._seconds, self._request_id = request, seconds, request_id
        self._stopped = asyncio.Event()
        self._response: web.StreamResponse | None = None
        self._task: asyncio.Task[None] | None = None
        # Most streams begin before the first comment is due, so that they need no task.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start)

    async def stop(self) -> web.StreamResponse | None:
        """End the comments; return the response if it has started."""
        self._timer.cancel()
        self._stopped.set()
        if self._task is not None:
            # A request that is cancelled here must still learn whether its response has started.
            await asyncio.shield(self._task)
        return self._response

    def cancel(self) -> None:
        """End the comments without waiting for one that a slow client has not read."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # If the client has left, the task of its request is cancelled.
        with suppress(ConnectionError):
            self._response = await self._begin()
            await self._response.write(_COMMENT)
            while not await self._is_stopped_within(self._seconds):
                await self._response.write(_COMMENT)

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        return self._stopped.is_set()

    async def _begin(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={headers.REQUEST_ID: self._request_id, **HEADERS})
        await response.prepare(self._request)
        return response


_END = b"\n\n"
_DONE = b"data: [DONE]"
_REASONS = (b'"finish_reason":"', b'"stop_reason":"')
"""The fields of the last event with tokens. Quotes within a text are escaped."""
_ERROR = b"event: error\ndata: "
_MAX_KEPT_BYTES = 2**20
"""The most that one stream keeps: 250,000 tokens, or the events of an engine that sends no tokens for them."""
_COMMENTS = re.compile(rb"^(?:" + RESUME_COMMENT + b"|" + TOKENS_COMMENT + rb").*(?:\n\n|\Z)", re.MULTILINE)
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_MAX_EVENTS = 4096
"""No engine sends more events than this at once."""


class OpenStream:
    """A stream to a client, over all replicas that contribute to it."""

    def __init__(self, body: Body) -> None:
        """Count what is kept as memory of ``body``, which is the request's."""
        self.response: web.StreamResponse | None = None
        """The answer to the client, once it has started."""
        self.track = ""
        """The track of the replica that began it; empty before that."""
        self.has_died = False
        """True if it ended because its replica, or the engine process there, died."""
        self.unsuited: set[str] = set()
        """The replicas that cannot continue it."""
        self._body = body
        self._kept_bytes = 0
        self._is_announced = self._is_given_up = False
        self._facts: dict[str, msgspec.Raw] | None = None
        self._tokens = array("i")
        self._held: list[bytes] = []
        self._is_finished = False

    @property
    def is_resumable(self) -> bool:
        """True if another replica can continue it."""
        return self._facts is not None

    @property
    def may_move(self) -> bool:
        """True if another replica can continue it and it is worth it: its last token was not sampled yet."""
        return self.is_resumable and not self._is_finished

    def feed(self, events: bytes) -> bytes:
        """Return the part of these whole events that can be relayed now."""
        if not self._is_announced or not events:
            return events
        if self._is_given_up or not events.endswith(_END) or events.count(_END) > _MAX_EVENTS:
            self._give_up()
            has_comments = RESUME_COMMENT in events or TOKENS_COMMENT in events
            return self.flush() + (_COMMENTS.sub(b"", events) if has_comments else events)
        out = []
        for event in events.split(_END)[:-1]:
            if event.startswith(RESUME_COMMENT):
                self._read_facts(event)
            elif event.startswith(TOKENS_COMMENT):
                self._read_tokens(event)
                out.append(self.flush())
            elif self._facts is None or (event.startswith(b":") and not self._held):
                out.append(event + _END)
            else:
                self._is_finished |= any(reason in event for reason in _REASONS)
                self._held.append(event + _END)
                self._keep(len(event) + len(_END))
            if self._held and self._facts is None:
                out.append(self.flush())  # the stream was given up
        return b"".join(out)

    def flush(self) -> bytes:
        """Return the events without a comment, at the end of the stream."""
        held = b"".join(self._held)
        self._held.clear()
        self._drop(len(held))
        return held

    def _read_facts(self, comment: bytes) -> None:
        if self._is_given_up:
            return
        try:
            facts = msgspec.json.decode(comment[len(RESUME_COMMENT) :], type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return self._give_up()
        self._facts = facts
        self._keep(len(comment))

    def _read_tokens(self, comment: bytes) -> None:
        if self._facts is None:
            return
        try:
            ids = msgspec.json.decode(comment[len(TOKENS_COMMENT) :], type=list[_TokenId])
        except (ValueError, RecursionError):
            return self._give_up()
        self._tokens.extend(ids)
        self._keep(len(ids) * self._tokens.itemsize)

    def _keep(self, size_bytes: int) -> None:
        """Count what is kept; give up what is too much for one stream, or for the client's share of the memory."""
        self._kept_bytes += size_bytes
        if self._kept_bytes > _MAX_KEPT_BYTES or not self._body.keep(size_bytes):
            self._kept_bytes -= size_bytes
            self._give_up()

    def _drop(self, size_bytes: int) -> None:
        size_bytes = min(size_bytes, self._kept_bytes)
        self._kept_bytes -= size_bytes
        self._body.drop(size_bytes)

    def _give_up(self) -> None:
        """Let no other replica continue the stream."""
        self._is_given_up, self._facts = True, None
        self._tokens = array("i")
        self._drop(self._kept_bytes)
        self._body.release()

    @property
    def is_complete(self) -> bool:
        """True if the last event has arrived, though the connection may break before its end."""
        # Line ends within a text are escaped, so that a line of the stream begins with it only at its end.
        held = b"".join(self._held)
        return held.startswith(_DONE) or b"\n" + _DONE in held

    def error_code(self) -> str | None:
        """Return the code of the error event with which the replica ended the stream, if it sent one."""
        _, found, error = b"".join(self._held).rpartition(_ERROR)
        return error_code(error) if found else None

    def start(self, *, is_announced: bool, track: str = "") -> None:
        """Begin to read a replica's answer. Events of the one before that were not relayed are dropped.

        Only the comments of a replica that announces them are read.
        """
        self.flush()
        self._is_announced = is_announced
        self.track = self.track or track

    def body(self, original: bytes) -> bytes:
        """Return the body of the request that continues the stream."""
        assert self._facts is not None
        facts = {**self._facts, "token_ids": self._tokens.tolist()}
        # Spliced: the rest of the object stays as the client wrote it.
        return b'{"%b":%b,' % (RESUME_FIELD.encode(), msgspec.json.encode(facts)) + original.lstrip()[1:]
