"""The end of a sequence by its sampled token. Stop strings are not known here: they belong to the text side."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    reason: FinishReason
    token_id: int | None = None
    """The token that ended the sequence if the reason is stop."""


def find_stop(
    token_id: int, *, stop_ids: Set[int], num_output: int, min_tokens: int, num_tokens: int, limit: int
) -> Stop | None:
    """Return the stop by ``token_id``, or None; the token is counted in ``num_output`` and in ``num_tokens``.

    A stop token before ``min_tokens`` outputs is a token like any other. A stop token that is also the last one allowed
    is a stop, because the model was finished.
    """
    if token_id in stop_ids and num_output > min_tokens:
        return Stop(reason="stop", token_id=token_id)
    if num_tokens >= limit:
        return Stop(reason="length")
    return None
