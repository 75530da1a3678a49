"""One request over HTTP, checked while it arrives. It is the shell around `answer` with sockets and the clock.

Nothing is retried: a failure is recorded as the client saw it. Every request uses its own connection. An idle
connection of a stopped server therefore causes no failure, and a Service spreads the requests.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import msgspec

from e2e_support.traffic.answer import Answer, BrokenOff, Form, Wrong, body_of
from e2e_support.traffic.prompts import Prompt
from e2e_support.traffic.result import Failure, FailureKind, Record


class EventReader:
    """A reader that yields the data of each event at its blank line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Return the data of all events that this chunk completes."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            yield b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])

    @property
    def rest(self) -> bytes:
        """Return the data after the last complete event."""
        return self._rest


REPLICA = "X-Quire-Replica"
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address for requests. `url` has no path."""

    url: str
    model: str
    api_key: str | None = None
    run_id: str = "traffic"
    """The prefix of request ids, which also appear in the servers' logs."""

    def headers(self, number: int) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{self.run_id}-{number:05d}"}
        return headers if self.api_key is None else headers | {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time after which a client considers a server stalled."""

    connect_seconds: float = 10.0
    silence_seconds: float = 60.0
    """The limit without a byte. A gateway may hold a request without replicas, so scenarios at zero replicas need more.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    number: int
    prompt: Prompt
    form: Form
    salted: bool
    """True if the request must not find blocks of others in the prefix cache."""
    beyond: int = 0
    """The number of tokens to request after the known ones."""


class Exchange:
    """A running request."""

    def __init__(self, ask: Ask, began: float) -> None:
        self.ask, self._began = ask, began
        self.answer = Answer(ask.prompt, ask.form, ask.beyond)
        self.started = self.now()
        self.chunk_times: list[float] = []
        self.replica: str | None = None

    def now(self) -> float:
        return time.monotonic() - self._began

    def record(self, failure: Failure | None) -> Record:
        prompt = self.ask.prompt
        return Record(
            number=self.ask.number,
            prompt=prompt.name,
            kind=prompt.kind,
            form=self.ask.form,
            expected_tokens=len(prompt.token_ids) + self.ask.beyond,
            started=self.started,
            chunk_times=tuple(self.chunk_times),
            ended=self.now(),
            replica=self.replica,
            failure=failure,
        )


class _BadStatus(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {' '.join(text.split())[:300]}")
        self.status = status


async def send(session: aiohttp.ClientSession, address: Address, exchange: Exchange, patience: Patience) -> Record:
    """Send the request, read to the end and return the record. Raise nothing except CancelledError."""
    try:
        await _exchange(session, address, exchange, patience)
    except Wrong as wrong:
        return exchange.record(Failure(kind=FailureKind.WRONG, message=str(wrong)))
    except BrokenOff as error:
        return exchange.record(Failure(kind=FailureKind.ERROR_EVENT, message=str(error)))
    except _BadStatus as error:
        return exchange.record(Failure(kind=FailureKind.STATUS, message=str(error), status=error.status))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        return exchange.record(Failure(kind=FailureKind.UNREACHABLE, message=_words(error)))
    except TimeoutError:
        silence = f"nothing came for {patience.silence_seconds:g} s after {len(exchange.chunk_times)} chunks"
        return exchange.record(Failure(kind=FailureKind.STALLED, message=silence))
    except (aiohttp.ClientError, OSError) as error:
        message = f"{_words(error)} after {len(exchange.chunk_times)} chunks"
        return exchange.record(Failure(kind=FailureKind.BROKEN, message=message))
    return exchange.record(None)


async def _exchange(session: aiohttp.ClientSession, address: Address, exchange: Exchange, patience: Patience) -> None:
    ask = exchange.ask
    path = "/v1/chat/completions" if ask.prompt.is_chat else "/v1/completions"
    salt = f"{address.run_id}-{ask.number}" if ask.salted else None
    body = body_of(ask.prompt, ask.form, ask.beyond, model=address.model, salt=salt)
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=patience.connect_seconds, sock_read=patience.silence_seconds
    )
    request = session.post(address.url + path, data=_encode(body), headers=address.headers(ask.number), timeout=limits)
    async with request as response:
        exchange.replica = response.headers.get(REPLICA)
        if response.status != 200:
            raise _BadStatus(response.status, await response.text(errors="replace"))
        if ask.form is Form.WHOLE:
            exchange.answer.take_whole(_parsed(await response.read()))
            exchange.chunk_times.append(exchange.now())
        else:
            await _read_stream(response, exchange)


async def _read_stream(response: aiohttp.ClientResponse, exchange: Exchange) -> None:
    """Read to the end of the body, because data after `[DONE]` or an error event is also wrong."""
    if response.content_type != "text/event-stream":
        raise Wrong(f"asked for a stream, got {response.content_type}")
    reader, end = EventReader(), _End()
    try:
        async for chunk in response.content.iter_any():
            now = exchange.now()
            for data in reader.feed(chunk):
                if _take(exchange.answer, data, end):
                    exchange.chunk_times.append(now)
    except aiohttp.ClientError:
        # A connection that is dropped after an error event has said why.
        if end.error is None:
            raise
    if end.error is not None:
        raise end.error
    if reader.rest:
        raise Wrong(f"half an event at the end: {reader.rest[:200]!r}")
    if not end.done:
        raise exchange.answer.cut()


@dataclass(slots=True)
class _End:
    """The end of a stream, once reached."""

    done: bool = False
    error: BrokenOff | None = None


def _take(answer: Answer, data: bytes, end: _End) -> bool:
    """Process one event. Return True if it contained a part of the answer."""
    if end.done or end.error is not None:
        raise Wrong(f"an event after {'[DONE]' if end.done else 'the error event'}: {data[:200]!r}")
    if data == b"[DONE]":
        answer.end()
        end.done = True
        return False
    try:
        return answer.take(_parsed(data))
    except BrokenOff as error:
        end.error = error
        return False


def _parsed(data: bytes) -> dict[str, object]:
    try:
        parsed = _decode(data)
    except msgspec.DecodeError as error:
        raise Wrong(f"no JSON ({error}): {data[:200]!r}") from None
    if not isinstance(parsed, dict):
        raise Wrong(f"no JSON object: {data[:200]!r}")
    return parsed


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
