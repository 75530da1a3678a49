"""The responses that are kept in the memory of the API process, up to a number of bytes.

The one that was not used for the longest time is dropped first, and a response that is generated only after all others.
Its generation is cancelled then, because no client can get its answer.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from quire_engine.errors import InvalidRequest, NotFound

_log = logging.getLogger(__name__)
_ENTRY_BYTES = 512
"""The memory of an entry besides its texts."""

Messages = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response that is kept."""

    id: str
    tenant: str | None
    """The name of the API key; other keys do not see the response."""
    body: bytes
    """The response object as JSON."""
    messages: bytes | None = None
    """The conversation with the answer, without instructions, as JSON; None if the response has no answer."""
    cancel: Callable[[], None] | None = None
    """A function that ends the generation of a background response, from any thread; None if that is finished."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return _ENTRY_BYTES + len(self.body) + len(self.messages or b"")


class ResponseStore:
    """The responses by id. Answers of great length are added in another thread."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0

    @property
    def enabled(self) -> bool:
        """True if responses are kept at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        """Return the number of responses that are kept."""
        return len(self._kept)

    def put(self, response: StoredResponse) -> bool:
        """Keep a response in the place of one with its id, and drop others where the memory ends.

        Return False if it is larger than the whole memory, so that it is not kept.
        """
        with self._lock:
            return self._put(response)

    def finish(self, response: StoredResponse, *, is_new: bool = False) -> StoredResponse:
        """Keep a finished response, and return it.

        One that is not new is kept only if it was not deleted meanwhile. If it ended otherwise, as by a cancellation,
        that end is kept and returned.
        """
        with self._lock:
            known = self._kept.get(response.id)
            if known is not None and known.cancel is None:
                return known
            if is_new or known is not None:
                self._put(response)
            return response

    def get(self, id: str, tenant: str | None) -> StoredResponse:
        """Return a response of a tenant. Raises NotFound."""
        with self._lock:
            found = self._kept.get(id)
            if found is None or found.tenant != tenant:
                raise NotFound(
                    f"no response {id[:100]!r} is kept here; responses are kept in memory for a limited time "
                    "(--response-store-memory)",
                    code="response_not_found",
                )
            self._kept.move_to_end(id)
            return found

    def delete(self, id: str, tenant: str | None) -> None:
        """Remove a response of a tenant, and cancel its generation. Raises NotFound."""
        self.get(id, tenant)
        with self._lock:
            self._drop(id)

    def conversation(self, id: str, tenant: str | None) -> Messages:
        """Return the messages of a response that a request continues. Raises InvalidRequest."""
        try:
            found = self.get(id, tenant)
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        if found.messages is None:
            raise InvalidRequest(
                f"previous_response_id: the response {id} has no complete answer to continue",
                param="previous_response_id",
                code="previous_response_incomplete",
            )
        messages: Messages = msgspec.json.decode(found.messages)
        return messages

    def _put(self, response: StoredResponse) -> bool:
        self._remove(response.id)
        if response.num_bytes > self._max_bytes:
            return False
        self._kept[response.id] = response
        self.num_bytes += response.num_bytes
        while self.num_bytes > self._max_bytes:
            finished = (id for id, kept in self._kept.items() if kept.cancel is None and kept is not response)
            if self._drop(next(finished, None) or next(iter(self._kept))):
                _log.warning("cancelled a background response: no memory is left (--response-store-memory)")
        return True

    def _drop(self, id: str) -> bool:
        """Remove a response, and cancel its generation; return whether it had one."""
        removed = self._remove(id)
        if removed is None or removed.cancel is None:
            return False
        removed.cancel()
        return True

    def _remove(self, id: str) -> StoredResponse | None:
        removed = self._kept.pop(id, None)
        if removed is not None:
            self.num_bytes -= removed.num_bytes
        return removed
