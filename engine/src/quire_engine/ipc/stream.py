"""One running sequence, as the API process follows it.

The engine's steps do not wait for readers: outputs are accumulated, and one ``read`` returns all of them. The unread
amount is bounded: the answer of a client that does not read it is ended. Used from the event loop only.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.errors import RequestError, RequestTimeout

MAX_UNREAD_BYTES = 2**20
"""About 26,000 tokens, or 600 with twenty logprobs each."""

_TOKEN_BYTES, _LOGPROBS_BYTES, _LOGPROB_BYTES = 40, 250, 70
"""The approximate sizes of list entries in CPython."""


@dataclass(slots=True)
class Update:
    """All outputs of one sequence since the last read."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if they were requested."""
    first_scheduled_time: float | None = None
    """The start of the sequence's first step, reported once."""
    finished: FinishedSequence | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The logprobs of the prompt's tokens from the second on, if requested: all before or with the first token."""
    num_cached_tokens: int | None = None
    """The prompt tokens that were found in the prefix cache, reported with ``first_scheduled_time``."""
    pooled: list[bytes] = field(default_factory=list)
    """The values of the next parts of a prompt that is pooled, in float32: all before or with the first token."""


class Stream:
    """A stream of outputs, created by ``EngineClient.submit``. ``give_up`` tells the engine to stop the sequence."""

    __slots__ = ("_ended", "_error", "_give_up", "_news", "_unread", "_update", "_waiter", "key")

    def __init__(self, key: int, *, give_up: Callable[[int], None]) -> None:
        self.key = key
        self._give_up = give_up
        self._update = Update()
        self._news = False
        self._unread = 0
        """The approximate number of unread bytes in the update."""
        self._ended = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> Update:
        """Wait for outputs and return them; the last update has ``finished`` set.

        Raise InvalidRequest if the engine rejects the request, Unavailable if the engine ended, RequestTimeout if too
        much was left unread.
        """
        assert self._waiter is None, "one reader at a time"
        while not self._news:
            if self._error is not None:
                raise self._error
            assert not self._ended, "read after the end"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        update, self._update, self._news, self._unread = self._update, Update(), False, 0
        return update

    def cancel(self) -> None:
        """Stop the sequence; a waiting read ends with the finish reason ``abort``. No effect after the end."""
        if not self._ended:
            self._give_up(self.key)
            self.finish(FinishedSequence(self.key, "abort", None))

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        update = self._update
        update.token_ids.append(token_id)
        self._unread += _TOKEN_BYTES
        if logprobs is not None:
            if update.logprobs is None:
                update.logprobs = []
            update.logprobs.append(logprobs)
            self._unread += _LOGPROBS_BYTES + _LOGPROB_BYTES * len(logprobs.token_ids)
        self._wake()
        if self._unread > MAX_UNREAD_BYTES:
            self._give_up(self.key)
            self.fail(RequestTimeout("the answer was read too slowly, so it was ended here", code="slow_reader"))

    def take_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        if self._update.prompt_logprobs is None:
            self._update.prompt_logprobs = []
        self._update.prompt_logprobs += entries
        self._wake()

    def take_pooled(self, values: bytes) -> None:
        self._update.pooled.append(values)
        self._wake()

    def first_scheduled(self, time: float, num_cached_tokens: int) -> None:
        self._update.first_scheduled_time = time
        self._update.num_cached_tokens = num_cached_tokens
        self._wake()

    def finish(self, finished: FinishedSequence) -> None:
        self._ended = True
        self._update.finished = finished
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error; earlier outputs can still be read before it is raised."""
        self._ended = True
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
