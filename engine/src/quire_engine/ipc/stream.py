"""One running sequence, as the API process follows it.

The engine's steps do not wait for readers: tokens are accumulated, and one ``read`` returns all of them. The unread
amount is bounded: the answer of a client that does not read it is ended. Used from the event loop only.
"""

import asyncio
from collections.abc import Callable

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.errors import RequestError, RequestTimeout

MAX_UNREAD_BYTES = 2**20
"""About 26,000 tokens, or 600 with twenty logprobs each."""

_TOKEN_BYTES, _LOGPROBS_BYTES, _LOGPROB_BYTES = 40, 250, 70
"""The approximate sizes of list entries in CPython."""


class Stream:
    """The output of one sequence, created by ``EngineClient.submit``; ``give_up`` tells the engine to stop it.

    Tokens are kept until they are read, everything else until the end.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_give_up",
        "_logprobs",
        "_news",
        "_token_ids",
        "_unread",
        "_waiter",
        "finished",
        "first_scheduled_time",
        "key",
        "num_cached_tokens",
        "pooled",
        "prompt_logprobs",
    )

    def __init__(self, key: int, *, give_up: Callable[[int], None]) -> None:
        self.key = key
        self.first_scheduled_time: float | None = None
        """The start of the sequence's first step."""
        self.num_cached_tokens = 0
        """The prompt tokens that were found in the prefix cache, known from the first step on."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """The logprobs of the prompt's tokens from the second on, if requested: all before or with the first token."""
        self.pooled: list[bytes] = []
        """The values of the parts of a prompt that is pooled, in float32: all before or with the first token."""
        self.finished: FinishedSequence | None = None
        """The end of the sequence; no token follows those that are unread now."""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._give_up = give_up
        self._news = False
        self._unread = 0
        """The approximate number of unread bytes."""
        self._ended = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait for output that was reported after the last wait; the last one sets ``finished``.

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
        self._news = False

    def read(self) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Return the unread tokens, and one entry for each if logprobs were requested."""
        unread = self._token_ids, self._logprobs
        self._token_ids, self._logprobs, self._unread = [], None, 0
        return unread

    def cancel(self) -> None:
        """Stop the sequence; a reader that waits sees the finish reason ``abort``. No effect after the end."""
        if not self._ended:
            self._give_up(self.key)
            self.finish(FinishedSequence(self.key, "abort", None))

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        self._unread += _TOKEN_BYTES
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.append(logprobs)
            self._unread += _LOGPROBS_BYTES + _LOGPROB_BYTES * len(logprobs.token_ids)
        self._wake()
        if self._unread > MAX_UNREAD_BYTES:
            self._give_up(self.key)
            self.fail(RequestTimeout("the answer was read too slowly, so it was ended here", code="slow_reader"))

    def take_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        self.prompt_logprobs += entries
        self._wake()

    def take_pooled(self, values: bytes) -> None:
        self.pooled.append(values)
        self._wake()

    def first_scheduled(self, time: float, num_cached_tokens: int) -> None:
        self.first_scheduled_time = time
        self.num_cached_tokens = num_cached_tokens
        self._wake()

    def finish(self, finished: FinishedSequence) -> None:
        self._ended = True
        self.finished = finished
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
