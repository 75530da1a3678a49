"""The addresses of the gateways: the pods with a label selector in one namespace, and configured URLs.

It lists pods at most every few seconds, and only on request.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from quire_common.names import url_host
from quire_operator.kube.errors import ClusterError

Read = Callable[[str, Sequence[tuple[str, str]]], Awaitable[Mapping[str, Any]]]

_LISTED_SECONDS = 2.0
_SCHEMES = ("https", "http")
"""The names of a gateway's port, which are also the schemes of its URL."""

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
        """Use only ``urls`` if ``selector`` is None."""
        self._read, self._selector, self._urls, self._now = read, selector, tuple(urls), now
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._found: tuple[str, ...] = ()
        self._listed: float | None = None
        self._failing = False

    async def addresses(self) -> Sequence[str]:
        """Return scheme, host and port of each gateway. While the API server is away, these are the last known ones."""
        due = self._listed is None or self._now() - self._listed >= _LISTED_SECONDS
        if self._selector is not None and due:
            self._listed = self._now()
            await self._list(self._selector)
        return (*self._urls, *self._found)

    async def _list(self, selector: str) -> None:
        # The API server may answer from its cache; a slightly old list does no harm.
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
    """Return the address, or None for a pod that has no requests because it is not ready yet or has ended."""
    status = pod.get("status") or {}
    ip = status.get("podIP")
    # A terminating pod gets no new requests but may still have old ones.
    if not ip or status.get("phase") != "Running" or not (_is_ready(pod) or _is_ending(pod)):
        return None
    numbers = _ports(pod)
    scheme = next((scheme for scheme in _SCHEMES if scheme in numbers), None)
    return None if scheme is None else f"{scheme}://{url_host(ip)}:{numbers[scheme]}"


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _is_ending(pod: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in (pod.get("metadata") or {})


def _ports(pod: Mapping[str, Any]) -> dict[str | None, int]:
    ports = [p for c in (pod.get("spec") or {}).get("containers") or () for p in c.get("ports") or ()]
    return {p.get("name"): p.get("containerPort") for p in ports}
