"""Where the gateways are: the pods of one label selector in one namespace, and addresses that were given.

Built by ``app`` for ``adapters.gateways``. Lists anew at most every few seconds, and only while somebody asks.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from quire_operator.ports import ClusterError

Read = Callable[[str, Sequence[tuple[str, str]]], Awaitable[Mapping[str, Any]]]

_LISTED_SECONDS = 2.0
_SCHEMES = ("https", "http")
"""The name of a gateway's port says what it speaks."""

_log = logging.getLogger(__name__)


class GatewayPods:
    def __init__(
        self,
        read: Read,
        *,
        namespace: str,
        selector: str | None,
        urls: Sequence[str] = (),
        now: Callable[[], float] = monotonic,
    ) -> None:
        """``selector`` None: only ``urls``."""
        self._read, self._selector, self._urls, self._now = read, selector, tuple(urls), now
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._found: tuple[str, ...] = ()
        self._listed: float | None = None
        self._failing = False

    async def addresses(self) -> Sequence[str]:
        """Scheme, host and port of each. While the API server is away those known last stand."""
        due = self._listed is None or self._now() - self._listed >= _LISTED_SECONDS
        if self._selector is not None and due:
            self._listed = self._now()
            await self._list(self._selector)
        return (*self._urls, *self._found)

    async def _list(self, selector: str) -> None:
        # From the API server's memory: no harm if it is a moment old.
        query = (("labelSelector", selector), ("resourceVersion", "0"))
        try:
            answer = await self._read(self._path, query)
        except ClusterError as error:
            if not self._failing:
                _log.warning("listing gateways failed, polling the known ones: %s", error)
            self._failing = True
            return
        self._failing = False
        addresses = map(_address, answer.get("items") or ())
        self._found = tuple(sorted(address for address in addresses if address is not None))


def _address(pod: Mapping[str, Any]) -> str | None:
    """None for a pod that has no requests: it is not ready yet, or has ended."""
    status = pod.get("status") or {}
    ip, metadata = status.get("podIP"), pod.get("metadata") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    # One that is about to go gets no new requests and still has old ones.
    if not ip or status.get("phase") != "Running" or not (ready or "deletionTimestamp" in metadata):
        return None
    ports = [p for c in (pod.get("spec") or {}).get("containers") or () for p in c.get("ports") or ()]
    numbers = {p.get("name"): p.get("containerPort") for p in ports}
    scheme = next((scheme for scheme in _SCHEMES if scheme in numbers), None)
    host = f"[{ip}]" if ":" in ip else ip
    return None if scheme is None else f"{scheme}://{host}:{numbers[scheme]}"
