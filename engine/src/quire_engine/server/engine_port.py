"""What the HTTP side asks of the engine. ``ipc.client.EngineClient`` gives it; tests have a smaller one."""

from collections.abc import Sequence
from typing import Protocol

from quire_engine.cpu.limits import CpuLimits
from quire_engine.ipc.messages import Ready, Sampling
from quire_engine.ipc.stream import Update


class EngineStream(Protocol):
    """One sequence under way."""

    key: int

    async def read(self) -> Update:
        """Waits for news. Raises InvalidRequest where the engine refuses it, Unavailable where the engine ended."""

    def cancel(self) -> None:
        """Stop it; a read under way ends with a finish for the reason ``abort``."""


class Engine(Protocol):
    @property
    def ready(self) -> Ready | None:
        """None while the engine process starts, or is being replaced."""

    @property
    def state(self) -> str:
        """A word for /readyz: starting, ready, restarting, failed, stopped."""

    @property
    def failure(self) -> str | None:
        """Why there will be no engine process any more."""

    @property
    def cpu(self) -> CpuLimits | None:
        """What the engine process may use of the CPU; None where it was not tried."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: Sampling,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        parent: int | None = None,
    ) -> EngineStream:
        """``parent`` is the key of the first stream with this prompt of the same HTTP request. Raises Unavailable while
        there is no engine process."""

    def reset_prefix_cache(self) -> None: ...
