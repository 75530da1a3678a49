"""Failed attempts of a request: why a replica gave no answer, and whether that was its fault."""

from dataclasses import dataclass
from time import monotonic

from aiohttp import web

from quire_common.contract.engine import ENGINE_STOPPED
from quire_gateway.fleet import Backend
from quire_gateway.resumable import OpenStream

BUSY, UNAVAILABLE = 429, 503
_ENGINE_ENDS = "shutting_down"
"""The code of the error with which an engine ends the streams that its drain leaves."""
UNSUITED = "unsuited"
"""The reason of the failed attempt of a replica that cannot continue a stream, for example with another tokenizer."""
NO_FAULT = frozenset({"busy", "moved", "stale", UNSUITED})
"""The reasons of failed attempts that are no errors of the replica's track: a full queue, a stream that leaves a
terminating replica, an idle connection that was closed, a stream of another model version.
"""
REFUSALS = frozenset({"busy", "stale", "unavailable", "unreachable", UNSUITED})
"""The reasons of failed attempts in which the replica did not work on the request."""
LOST = frozenset({"disconnected", "engine_stopped"})
"""The reasons of attempts that were under way when the replica, or its engine process, died."""
GONE = frozenset({"stale", "unreachable", "unavailable"})
"""The reasons of the attempts that follow a stale one if the replica, or its engine process, died at that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed before the first byte."""

    reason: str
    cause: str
    answer: web.Response | None = None
    """The replica's answer, if it gave one."""


class ReplicaDied(Exception):
    """A replica whose connection broke during its answer. Writing to the client raises the same errors in aiohttp."""


def disconnected(backend: Backend, error: Exception) -> FailedAttempt:
    """Return the failed attempt of a replica that closed the connection too early, and record its failure."""
    backend.record_failure(monotonic(), unreachable=True)
    return FailedAttempt(reason="disconnected", cause=f"closed the connection before the end of its answer: {error}")


def refusal(answer: web.Response, code: str | None) -> FailedAttempt:
    """Return the failed attempt of an answer with status 429 or 503 and this code of its error."""
    if answer.status == BUSY:
        reason, cause = "busy", f"answered {answer.status}"
    elif code == ENGINE_STOPPED:
        reason, cause = "engine_stopped", "lost its engine process while it worked on the request"
    else:
        reason, cause = "unavailable", f"answered {answer.status}"
    return FailedAttempt(reason=reason, cause=cause, answer=answer)


def lost_stream(stream: OpenStream, death: ReplicaDied) -> FailedAttempt | None:
    """Return the failed attempt of a stream that another replica can continue; None for a stream that has ended."""
    if stream.is_complete:
        return None
    code = stream.error_code()
    if code == _ENGINE_ENDS:
        return FailedAttempt(reason="moved", cause="is terminating")
    if code == ENGINE_STOPPED:
        return FailedAttempt(reason="engine_stopped", cause="lost its engine process while it worked on the stream")
    return None if code else FailedAttempt(reason="disconnected", cause=f"closed the connection of the stream: {death}")
