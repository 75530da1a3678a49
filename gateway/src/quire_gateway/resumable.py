"""The part of a stream that a gateway keeps so that another replica can continue it.

Under ``attempt``. The engine sends facts about the stream and, after events, the tokens of these events as comments.
Events are relayed with the comment that follows them, so the tokens are always exactly those whose events the client
has. The comments themselves are never relayed.
"""

from array import array

import msgspec
from aiohttp import web

from quire_common.contract.engine import RESUME_COMMENT, RESUME_FIELD, TOKENS_COMMENT
from quire_gateway.errors import error_code

_END = b"\n\n"
_DONE = b"data: [DONE]"
_REASONS = (b'"finish_reason":"', b'"stop_reason":"')
"""The fields of the last event with tokens. Quotes within a text are escaped."""
_ERROR = b"event: error\ndata: "


class OpenStream:
    """A stream to a client, over all replicas that contribute to it."""

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None
        """The answer to the client, once it has started."""
        self.track = ""
        """The track of the replica that began it; empty before that."""
        self.unsuited: set[str] = set()
        """The replicas that cannot continue it."""
        self._is_announced = False
        self._facts: dict[str, msgspec.Raw] | None = None
        self._tokens = array("q")
        self._held = b""
        self._is_finished = False

    @property
    def is_resumable(self) -> bool:
        """True if another replica can continue it."""
        return self._facts is not None

    @property
    def has_tokens(self) -> bool:
        """True if another replica can continue it after tokens that the client has."""
        return self.is_resumable and bool(self._tokens)

    @property
    def may_move(self) -> bool:
        """True if another replica can continue it and it is worth it: its last token was not sampled yet."""
        return self.is_resumable and not self._is_finished

    def feed(self, events: bytes) -> bytes:
        """Return the part of these whole events that can be relayed now."""
        if not self._is_announced:
            return events
        out = []
        for event in events.split(_END)[:-1]:
            if event.startswith(RESUME_COMMENT):
                self._facts = msgspec.json.decode(event[len(RESUME_COMMENT) :], type=dict[str, msgspec.Raw])
            elif event.startswith(TOKENS_COMMENT):
                self._tokens.extend(msgspec.json.decode(event[len(TOKENS_COMMENT) :], type=list[int]))
                out.append(self._held)
                self._held = b""
            elif self._facts is None or (event.startswith(b":") and not self._held):
                out.append(event + _END)
            else:
                self._is_finished |= any(reason in event for reason in _REASONS)
                self._held += event + _END
        return b"".join(out)

    def flush(self) -> bytes:
        """Return the events without a comment, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    @property
    def is_complete(self) -> bool:
        """True if the last event has arrived, though the connection may break before its end."""
        # Line ends within a text are escaped, so that a line of the stream begins with it only at its end.
        return self._held.startswith(_DONE) or b"\n" + _DONE in self._held

    def error_code(self) -> str | None:
        """Return the code of the error event with which the replica ended the stream, if it sent one."""
        _, found, error = self._held.rpartition(_ERROR)
        return error_code(error) if found else None

    def start(self, *, is_announced: bool, track: str = "") -> None:
        """Begin to read a replica's answer. Events of the one before that were not relayed are dropped.

        Only the comments of a replica that announces them are read.
        """
        self._is_announced, self._held = is_announced, b""
        self.track = self.track or track

    def body(self, original: bytes) -> bytes:
        """Return the body of the request that continues the stream."""
        assert self._facts is not None
        facts = {**self._facts, "token_ids": self._tokens.tolist()}
        # Spliced: the rest of the object stays as the client wrote it.
        return b'{"%b":%b,' % (RESUME_FIELD.encode(), msgspec.json.encode(facts)) + original.lstrip()[1:]
