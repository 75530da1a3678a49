"""Which of several operators writes: the holder of a Lease, and only while it can be sure to be the holder.

``Elector.run`` campaigns, leads, and campaigns again; ``gate`` is what it opens. Others take over 15 s after the Lease
last changed, by their own clock. Why not the client library's election: docs/adr/0017-own-leader-election.md.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from quire_operator.gate import Gate, boottime
from quire_operator.ports import ClusterError, Conflict

logger = logging.getLogger(__name__)

DURATION_SECONDS, RETRY_SECONDS, CALL_SECONDS = 15.0, 2.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The record as it is in the cluster. ``version`` None: it is not there yet."""

    version: str | None
    holder: str = ""
    """Empty when nobody holds it."""
    acquired: datetime | None = None
    renewed: datetime | None = None
    transitions: int = 0


class Leases(Protocol):
    """The one Lease of this operator."""

    async def read(self) -> Lease: ...

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        """Create or replace; ``Conflict`` unless it still has this version."""
        ...


class Elector:
    """One candidate. ``lead`` runs while it holds the Lease, and is cancelled when it can't be sure of that."""

    def __init__(self, *, leases: Leases, identity: str, gate: Gate, lead: Callable[[], Awaitable[None]]) -> None:
        self._leases, self._identity, self._gate, self._lead = leases, identity, gate, lead
        self._lease = Lease(version=None)
        self._unchanged_since = boottime()
        self._news = asyncio.Event()

    @property
    def newest_renewal(self) -> datetime | None:
        """Anybody's, as our own calls last saw it; a watch that is alive shows it soon."""
        return self._lease.renewed

    def notice(self, holder: str) -> None:
        """A watch shows this holder: act now, not at the next round."""
        leading = self._gate.is_open()
        if leading and holder not in ("", self._identity):
            self._gate.close()
        if not holder or (leading and holder != self._identity):
            self._news.set()

    async def run(self) -> None:
        """Until cancelled; then the Lease is released, if it is ours. Raises what ``lead`` raises."""
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
            while not task.done() and self._gate.is_open():
                await self._wait()
                if self._gate.is_open() and not await self._try(self._renew) and self._lease.holder != self._identity:
                    break
            self._gate.close()  # lost: nothing under way may write any more
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._gate.close()
        if not task.cancelled():
            task.result()

    async def _acquire(self) -> bool:
        await self._look()
        seen, is_ours = self._lease, self._lease.holder == self._identity
        if seen.holder and not is_ours and boottime() - self._unchanged_since < DURATION_SECONDS:
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
            await self._look()
            return False
        return True

    async def _release(self) -> bool:
        if self._lease.holder == self._identity:
            released = replace(self._lease, holder="", renewed=datetime.now(UTC))
            await asyncio.wait_for(self._leases.write(released, duration_seconds=1.0), CALL_SECONDS)
        return True

    async def _look(self) -> None:
        seen = await asyncio.wait_for(self._leases.read(), CALL_SECONDS)
        if seen != self._lease:
            self._lease, self._unchanged_since = seen, boottime()

    async def _write(self, lease: Lease) -> None:
        sent = boottime()
        written = self._leases.write(lease, duration_seconds=DURATION_SECONDS)
        self._lease = await asyncio.wait_for(written, CALL_SECONDS)
        self._gate.renewed(sent)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), RETRY_SECONDS)
        self._news.clear()

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await step()
        except Conflict:
            return False  # somebody was quicker; look again at the next round
        except (ClusterError, TimeoutError) as error:
            logger.warning("the Lease could not be read or written: %s", error or "no answer in time")
            return False
