"""Leader election by a Lease, and the write fence that it opens.

The fence is open for 10 s from when the last successful renewal was *sent*, and a call takes at most 5 s. So the last
write has ended when another operator may take over, 15 s after the last change of the Lease by its own clock. ADR 0017
says why this does not use the client library's election.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator.kube.connection import Connection
from quire_operator.kube.errors import ClusterError, Conflict, NotFound

FENCE_SECONDS = 10.0


def boottime() -> float:
    """Return the seconds since boot, including time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WriteFence:
    """A fence that is open while this process may write."""

    def __init__(self, *, now: Callable[[], float] = boottime, open_seconds: float = FENCE_SECONDS) -> None:
        self._now, self._open_seconds = now, open_seconds
        self._sent: float | None = None

    def renewed(self, sent: float) -> None:
        """Keep the fence open from the time at which a successful renewal was sent."""
        self._sent = sent

    def close(self) -> None:
        self._sent = None

    def is_open(self) -> bool:
        return self._sent is not None and self._now() - self._sent < self._open_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The Lease as it is in the cluster. ``version`` is None if it does not exist yet."""

    version: str | None
    holder: str = ""
    """The identity of the leader; empty without a leader."""
    acquired: datetime | None = None
    renewed: datetime | None = None
    transitions: int = 0


class KubeLeases:
    def __init__(self, connection: Connection, *, namespace: str, name: str) -> None:
        self._connection, self._namespace, self._name = connection, namespace, name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self) -> Lease:
        try:
            return _lease(await self._connection.read(f"{self._path}/{self._name}"))
        except NotFound:
            return Lease(version=None)

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        """Create or replace the Lease. Raises ``Conflict`` if its version has changed."""
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": lease.holder,
                "leaseDurationSeconds": int(duration_seconds),
                "acquireTime": _text(lease.acquired),
                "renewTime": _text(lease.renewed),
                "leaseTransitions": lease.transitions,
            },
        }
        if lease.version is None:
            return _lease(await self._connection.write("create", "Lease", "POST", self._path, body=body))
        metadata["resourceVersion"] = lease.version
        path = f"{self._path}/{self._name}"
        return _lease(await self._connection.write("replace", "Lease", "PUT", path, body=body))


def _lease(body: Mapping[str, Any]) -> Lease:
    spec = body.get("spec") or {}
    return Lease(
        version=body["metadata"]["resourceVersion"],
        holder=spec.get("holderIdentity") or "",
        acquired=_time(spec.get("acquireTime")),
        renewed=_time(spec.get("renewTime")),
        transitions=spec.get("leaseTransitions") or 0,
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="microseconds").replace("+00:00", "Z")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times in seconds. A lease lasts longer than the fence stays open plus the duration of one call."""

    duration: float = 15.0
    retry: float = 2.0
    call: float = 5.0


class Elector:
    """A candidate for the Lease. ``lead`` runs while it holds the Lease and is cancelled when that is uncertain."""

    def __init__(
        self,
        *,
        leases: KubeLeases,
        identity: str,
        fence: WriteFence,
        lead: Callable[[], Awaitable[None]],
        seen: Callable[[datetime | None], None] = lambda renewed: None,
        timing: Timing = Timing(),
    ) -> None:
        """``seen`` is called with each renewal that our own calls see, of any holder.

        ``WatchHealth`` compares these renewals with those that the watches show.
        """
        self._seen = seen
        self._leases, self._identity, self._fence, self._lead, self._timing = leases, identity, fence, lead, timing
        self._lease = Lease(version=None)
        self._unchanged_since = boottime()
        self._news = asyncio.Event()

    def notice(self, holder: str) -> None:
        """Handle the holder that a watch reports without waiting for the next round."""
        leading = self._fence.is_open()
        if leading and holder not in ("", self._identity):
            self._fence.close()
        if not holder or (leading and holder != self._identity):
            self._news.set()

    async def run(self) -> None:
        """Campaign and lead until cancelled; then release the Lease if it is ours. Raises what ``lead`` raises."""
        try:
            while True:
                while not await self._try(self._acquire):
                    await self._wait()
                logger.info("leading, as %s", self._identity)
                await self._hold()
                logger.warning("no longer leading")
        finally:
            await self._try(self._release)

    async def _hold(self) -> None:
        task = asyncio.ensure_future(self._lead())
        task.add_done_callback(lambda _: self._news.set())
        try:
            while not task.done() and self._fence.is_open():
                await self._wait()
                if self._fence.is_open() and not await self._try(self._renew) and self._lease.holder != self._identity:
                    break
            self._fence.close()  # lost: pending writes must not start any more
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._fence.close()
        if not task.cancelled():
            task.result()

    async def _acquire(self) -> bool:
        await self._read_lease()
        seen, is_ours = self._lease, self._lease.holder == self._identity
        if seen.holder and not is_ours and boottime() - self._unchanged_since < self._timing.duration:
            return False
        now = datetime.now(UTC)
        acquired = seen.acquired if is_ours else now
        transitions = seen.transitions + (not is_ours and seen.version is not None)
        await self._write(replace(seen, holder=self._identity, acquired=acquired, renewed=now, transitions=transitions))
        return True

    async def _renew(self) -> bool:
        try:
            await self._write(replace(self._lease, renewed=datetime.now(UTC)))
        except Conflict:
            await self._read_lease()
            return False
        return True

    async def _release(self) -> bool:
        if self._lease.holder == self._identity:
            released = replace(self._lease, holder="", renewed=datetime.now(UTC))
            async with asyncio.timeout(self._timing.call):
                await self._leases.write(released, duration_seconds=1.0)
        return True

    async def _read_lease(self) -> None:
        async with asyncio.timeout(self._timing.call):
            seen = await self._leases.read()
        if seen != self._lease:
            self._lease, self._unchanged_since = seen, boottime()
        self._seen(seen.renewed)

    async def _write(self, lease: Lease) -> None:
        sent = boottime()
        async with asyncio.timeout(self._timing.call):
            self._lease = await self._leases.write(lease, duration_seconds=self._timing.duration)
        self._fence.renewed(sent)
        self._seen(self._lease.renewed)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.retry):  # wait_for of Python 3.11 can lose a cancellation
                await self._news.wait()
        self._news.clear()

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await step()
        except Conflict:
            return False  # another candidate was faster; read the Lease again in the next round
        except (ClusterError, TimeoutError) as error:
            logger.warning("the Lease could not be read or written: %s", error or "no answer in time")
            return False
