"""The bodies of requests: one copy of each, within one budget of memory, freed as soon as no retry can follow.

Under ``proxy``. A body counts from its first byte, whether its request is uploading, held or being sent. The budget is
one for all models, because all bodies share the memory of one process. What a gateway keeps of a resumable stream
counts as part of its request's body. An owner uses at most as much as it leaves free, so that one API key
cannot take the memory of all others. Without keys there are no owners: behind a load balancer, all clients have one
address.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import payload, web
from aiohttp.abc import AbstractStreamWriter

from quire_gateway.errors import BadRequest, BodyMemoryFull, BodyTooLarge, RateLimited, RequestTimeout

_READ_SECONDS = 60.0
_STALLED_SECONDS = 10.0
"""An upload without a byte for this long is given up."""
_RETRY_AFTER_SECONDS = 2
_CHUNK_BYTES = 2**18


class BodyMemory:
    """The memory that the bodies of all requests in flight may use together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._used_by: Counter[str | None] = Counter()

    def reserve(self, size_bytes: int, *, owner: str | None, had_bytes: int = 0, upcoming_bytes: int = 0) -> None:
        """Reserve memory for a body that has ``had_bytes`` of it.

        Raise ``BodyMemoryFull`` if it, or what is announced to follow, does not fit, and ``RateLimited`` if the owner
        would have more than what is left for all others.
        """
        more, own = size_bytes + upcoming_bytes, self._used_by[owner]
        if self.used_bytes + more > self._limit_bytes:
            raise BodyMemoryFull(
                f"the bodies of the requests in flight use {self.used_bytes} of this gateway's {self._limit_bytes} "
                "bytes, and this body does not fit in addition",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        # The only body of an owner is accepted if it fits.
        if owner is not None and own > had_bytes and own + more > self._limit_bytes - self.used_bytes - more:
            raise RateLimited(
                f"the bodies of your own requests in flight use {own} bytes, and this one in addition would leave less "
                "than that to all others; wait until some of them are answered",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self.used_bytes += size_bytes
        self._used_by[owner] += size_bytes

    def free(self, size_bytes: int, *, owner: str | None) -> None:
        self.used_bytes -= size_bytes
        self._used_by[owner] -= size_bytes
        if not self._used_by[owner]:
            del self._used_by[owner]


class Body:
    """The body of one request. It is freed on ``release``, or when an attempt that still sends it has ended.

    ``owner`` is the tenant of the request's API key; None without a key.
    """

    def __init__(self, memory: BodyMemory, owner: str | None) -> None:
        self._memory, self._owner = memory, owner
        self._reserved_bytes = 0
        self._data = bytearray()
        self._sends = 0
        self._is_released = False

    @property
    def data(self) -> bytearray:
        """The bytes; empty after the release."""
        return self._data

    async def read(self, request: web.Request, *, max_bytes: int) -> None:
        """Read the whole body. Raise ``GatewayError`` if it is too large, too slow or broken, or memory is short."""
        try:
            async with asyncio.timeout(_STALLED_SECONDS) as deadline:
                await self._read(request, max_bytes, deadline)
        except TimeoutError:
            raise RequestTimeout(
                f"the request body did not arrive within {_READ_SECONDS:.0f} s, or nothing of it arrived for "
                f"{_STALLED_SECONDS:.0f} s"
            ) from None
        except web.RequestPayloadError as error:
            reason = " ".join(str(error).split())
            raise BadRequest(f"the request body is incomplete or cannot be decompressed: {reason}") from None

    async def _read(self, request: web.Request, max_bytes: int, deadline: asyncio.Timeout) -> None:
        now = asyncio.get_running_loop().time
        last = now() + _READ_SECONDS
        announced = request.content_length or 0
        if announced > max_bytes:
            raise _too_large(max_bytes)
        # A body that cannot fit is refused before its upload; it is charged as it arrives, so that a client that
        # only announces a body takes nothing from others.
        self._memory.reserve(0, owner=self._owner, upcoming_bytes=announced)
        while chunk := await request.content.readany():
            if len(self._data) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            self._reserve(len(chunk))
            self._data += chunk
            deadline.reschedule(min(last, now() + _STALLED_SECONDS))

    def keep(self, size_bytes: int) -> bool:
        """Reserve memory for a part of the answer; return whether there is enough. ``release`` frees it too."""
        if self._is_released:
            return False
        try:
            self._reserve(size_bytes)
        except (BodyMemoryFull, RateLimited):
            return False
        return True

    def drop(self, size_bytes: int) -> None:
        """Free memory that ``keep`` reserved."""
        size_bytes = min(size_bytes, self._reserved_bytes)
        self._memory.free(size_bytes, owner=self._owner)
        self._reserved_bytes -= size_bytes

    def _reserve(self, size_bytes: int) -> None:
        self._memory.reserve(size_bytes, owner=self._owner, had_bytes=self._reserved_bytes)
        self._reserved_bytes += size_bytes

    @contextmanager
    def sent(self) -> Iterator[bytearray]:
        """Give the bytes to an attempt; they stay while the context lasts."""
        self._sends += 1
        try:
            yield self._data
        finally:
            self._sends -= 1
            self._free_if_unused()

    def release(self) -> None:
        """Free the memory: no attempt follows."""
        self._is_released = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._is_released and not self._sends:
            self._data = bytearray()
            self._memory.free(self._reserved_bytes, owner=self._owner)
            self._reserved_bytes = 0


class BodyPayload(payload.Payload):
    """A body as aiohttp sends it: in pieces, so that the transport never holds a second copy of the whole."""

    _value: Body

    def __init__(self, body: Body) -> None:
        super().__init__(body, content_type="application/json")
        self._size = len(body.data)

    async def write(self, writer: AbstractStreamWriter) -> None:
        with self._value.sent() as data:
            view = memoryview(data)
            for start in range(0, len(data), _CHUNK_BYTES):
                await writer.write(bytes(view[start : start + _CHUNK_BYTES]))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.data.decode(encoding, errors)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than this gateway's limit of {limit} bytes")
