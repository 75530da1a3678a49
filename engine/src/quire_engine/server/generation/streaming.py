"""The HTTP answer that streams a generation, and the one that waits for its end.

A stream that breaks off ends in an SSE error event without ``[DONE]``, and the connection is closed before the body's
end: no client can take it for a whole answer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_engine.errors import InternalError, InvalidRequest, RequestError
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.generation.generation import ClientGone, Generation
from quire_engine.server.http import sse

_log = logging.getLogger(__name__)

_SEND_TIMEOUT_SECONDS = 60.0
"""A client that takes nothing for so long is gone for us. Until then its tokens wait as numbers, not as text."""

CLIENT_CLOSED_REQUEST = 499

MAX_LOGPROBS_HELD = 500_000
"""Of an answer in one piece: some 30 MB of JSON, and ten times that while it is made."""
_MANY_LOGPROBS = 10_000
"""Above that the answer is made in a thread: the event loop streams for others meanwhile."""


class Writer(Protocol):
    """How one route writes answers."""

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta."""

    def last(self, choices: list[Choice]) -> bytes:
        """The events after the last delta of a success."""

    def whole(self, choices: list[Choice], deltas: list[Delta]) -> bytes:
        """The body of an answer in one piece."""


class DisconnectWatch:
    """Calls ``gone`` once the client has closed the connection. The body must have been read whole before."""

    def __init__(self, request: Request, gone: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._watch(request, gone))

    async def _watch(self, request: Request, gone: Callable[[], None]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone()

    def stop(self) -> None:
        self._task.cancel()


async def answer(request: Request, generation: Generation, writer: Writer, *, stream: bool) -> Response:
    """Raises RequestError as long as nothing was sent."""
    watch = DisconnectWatch(request, generation.abandon)
    handed_over = False
    try:
        first = await generation.first()
        if stream:
            handed_over = True
            return _EventStream(generation, writer, first, watch)
        return Response(await _whole(generation, writer, first), media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_over:
            watch.stop()
            generation.close()


async def _whole(generation: Generation, writer: Writer, first: list[Delta]) -> bytes:
    deltas, held = first, _num_logprobs(first)
    async for more in generation.deltas():
        deltas += more
        held += _num_logprobs(more)
        if held > MAX_LOGPROBS_HELD:
            raise InvalidRequest(
                f"an answer in one piece holds at most {MAX_LOGPROBS_HELD} logprobs, and this one has more; "
                "set stream to true, or ask for fewer",
                param="stream",
                code="answer_too_large",
            )
    choices = generation.choices
    if held + sum([len(choice.prompt_logprobs) for choice in choices]) > _MANY_LOGPROBS:
        return await asyncio.to_thread(writer.whole, choices, deltas)
    return writer.whole(choices, deltas)


def _num_logprobs(deltas: list[Delta]) -> int:
    return sum([len(one.token_ids) for delta in deltas for one in delta.logprobs])


class _EventStream(Response):
    def __init__(self, generation: Generation, writer: Writer, first: list[Delta], watch: DisconnectWatch) -> None:
        super().__init__(headers=sse.HEADERS)
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
                    await asyncio.create_task(self._send_events(sender))
        except (ClientGone, TimeoutError):
            _log.info("the client went away, its request is ended")
        finally:
            self._watch.stop()
            self._generation.close()

    async def _send_events(self, sender: "_PatientSender") -> None:
        chunk = self._writer.chunk
        try:
            await sender.send(b"".join([chunk(delta) for delta in self._first]))
            async for deltas in self._generation.deltas():
                await sender.send(b"".join([chunk(delta) for delta in deltas]))
            await sender.send(self._writer.last(self._generation.choices), more=False)
        except RequestError as error:
            await sender.send(sse.error_event(error))
        except (ClientGone, TimeoutError):
            raise
        except Exception:
            _log.exception("a stream broke off by a fault of ours")
            await sender.send(sse.error_event(InternalError("the server failed; see its log")))


class _PatientSender:
    """Sends the parts of one body, until the client has taken nothing of one for too long: then ``deadline`` is over.

    One timer a stream looks now and then whether a send is stuck: a timer about each send would cost as much as the
    token's text.
    """

    LOOKS = 4

    def __init__(self, send: Send, deadline: asyncio.Timeout) -> None:
        self._send = send
        self._deadline = deadline
        self._sending = False
        self._looks = 0
        """How often the send under way was seen."""

    def __enter__(self) -> Self:
        self._look_later()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def send(self, body: bytes, *, more: bool = True) -> None:
        self._looks = 0
        self._sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SEND_TIMEOUT_SECONDS / self.LOOKS, self._look)

    def _look(self) -> None:
        self._looks = self._looks + 1 if self._sending else 0
        if self._looks > self.LOOKS:
            self._deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_later()
