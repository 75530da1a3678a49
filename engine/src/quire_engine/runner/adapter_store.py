"""The adapters in host memory: read from disk in a thread of their own, kept by last use, and copied into slots.

A step never waits for a disk: the thread reads, and ``take_events`` and ``has`` show what it has read. An adapter with
requests (``hold``) stays in memory until they have ended; of the others, the one used longest ago goes first. What was
removed from memory is read again when a request needs it.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.core.batch import Batch
from quire_engine.core.ports import AdapterEvent
from quire_engine.errors import AdapterError
from quire_engine.model.adapters.config import CONFIG
from quire_engine.model.adapters.peft import WEIGHTS, read_adapter
from quire_engine.model.adapters.slots import AdapterPool, AdapterWeights

_log = logging.getLogger(__name__)
_NICENESS = 10
"""The priority of the thread, so that it takes no core from a step that computes."""


class AdapterStore:
    """A ``core.ports.AdapterStore`` over folders; at most ``capacity`` adapters are in memory."""

    def __init__(
        self,
        *,
        modules: Mapping[str, tuple[int, int]],
        max_rank: int,
        dtype: torch.dtype,
        capacity: int,
        pinned: bool = False,
    ) -> None:
        """Start the thread; ``pinned`` adapters are in page-locked memory, for a GPU."""
        self._pinned = pinned
        self._modules, self._max_rank, self._dtype, self._capacity = modules, max_rank, dtype, capacity
        self._folders: dict[int, Path] = {}
        self._weights: OrderedDict[int, AdapterWeights] = OrderedDict()
        self._held: Counter[int] = Counter()
        self._reading: set[int] = set()
        """The adapters that the thread reads, or will, and for which there is room in memory."""
        self._checking: set[int] = set()
        """The adapters that were added when there was no room: they are read and checked, and kept if there is some."""
        self._read: deque[tuple[int, AdapterWeights | AdapterError]] = deque()
        self._orders: deque[int] = deque()
        self._ordered = threading.Semaphore(0)
        self._stamps: dict[int, tuple[tuple[int, int, int], ...]] = {}
        """The state of the files of each adapter when it was read first."""
        self._closed = False
        self.on_read: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="adapter reader", daemon=True)
        self._thread.start()

    def add(self, adapter: int, folder: str) -> None:
        self._folders[adapter] = Path(folder)
        if not self.fetch(adapter):
            self._checking.add(adapter)
            self._orders.append(adapter)
            self._ordered.release()

    def remove(self, adapter: int) -> None:
        self._folders.pop(adapter, None)
        self._weights.pop(adapter, None)
        self._stamps.pop(adapter, None)

    def has(self, adapter: int) -> bool:
        return adapter in self._weights

    def knows(self, adapter: int) -> bool:
        return adapter in self._folders

    def fetch(self, adapter: int) -> bool:
        if adapter in self._weights or adapter in self._reading:
            return True
        if not self._make_room():
            return False
        self._reading.add(adapter)
        if adapter in self._checking:
            self._checking.discard(adapter)  # the thread reads it anyway
        else:
            self._orders.append(adapter)
            self._ordered.release()
        return True

    def _make_room(self) -> bool:
        """Remove adapters without requests until one more fits; return False if it does not."""
        while len(self._weights) + len(self._reading) >= self._capacity:
            unused = next((adapter for adapter in self._weights if not self._held[adapter]), None)
            if unused is None:
                return False
            del self._weights[unused]
        return True

    def hold(self, adapter: int) -> None:
        self._held[adapter] += 1
        if adapter in self._weights:
            self._weights.move_to_end(adapter)

    def release(self, adapter: int) -> None:
        self._held[adapter] -= 1
        if not self._held[adapter]:
            del self._held[adapter]

    def weights(self, adapter: int) -> AdapterWeights:
        """Return the matrices of an adapter that is held."""
        return self._weights[adapter]

    def take_events(self) -> list[AdapterEvent]:
        events = []
        while self._read:
            adapter, result = self._read.popleft()
            self._reading.discard(adapter)
            self._checking.discard(adapter)
            if adapter not in self._folders:
                continue  # it was removed meanwhile
            if isinstance(result, AdapterError):
                events.append(AdapterEvent(adapter=adapter, reason=result.reason, message=str(result)))
                continue
            if self._make_room():
                self._weights[adapter] = result
            events.append(AdapterEvent(adapter=adapter, rank=result.rank, num_bytes=result.num_bytes))
        return events

    def close(self) -> None:
        self._closed = True
        self._ordered.release()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            self._ordered.acquire()
            if self._closed:
                return
            adapter = self._orders.popleft()
            self._read.append((adapter, self._load(adapter)))
            if self.on_read is not None:
                self.on_read()

    def _check_stamp(self, adapter: int, folder: Path) -> None:
        """Raise AdapterError if the files were replaced: cached prefixes of this number belong to the files before."""
        found = [file.stat() for file in (folder / CONFIG, folder / WEIGHTS) if file.is_file()]
        stamp = tuple((status.st_mtime_ns, status.st_ino, status.st_size) for status in found)
        if self._stamps.setdefault(adapter, stamp) != stamp:
            raise AdapterError(
                AdapterFailure.INVALID, f"the files in {folder} changed after the adapter was loaded: load it again"
            )

    @torch.inference_mode()
    def _load(self, adapter: int) -> AdapterWeights | AdapterError:
        folder = self._folders.get(adapter)
        if folder is None:
            return AdapterError(AdapterFailure.INVALID, "it was unloaded")
        began = time.perf_counter()
        try:
            self._check_stamp(adapter, folder)
            weights = read_adapter(folder, self._modules, max_rank=self._max_rank, dtype=self._dtype)
            if self._pinned:
                weights = weights.pinned()
        except AdapterError as error:
            return error
        except Exception as error:
            _log.exception("reading the adapter in %s failed", folder)
            return AdapterError(AdapterFailure.INVALID, f"{folder} cannot be read: {type(error).__name__}: {error}")
        _log.info(
            "read the adapter in %s: rank %d, %.1f MB in %.2f s",
            folder,
            weights.rank,
            weights.num_bytes / 1e6,
            time.perf_counter() - began,
        )
        return weights


class RunnerAdapters:
    """The adapters of a runner: the slots of the model, and the store from which they are filled."""

    def __init__(self, pool: AdapterPool, store: AdapterStore) -> None:
        self.pool, self.store = pool, store

    def apply(self, batch: Batch) -> None:
        """Copy the adapters of a batch into their slots."""
        for load in batch.adapter_loads:
            self.pool.write(load.slot, self.store.weights(load.adapter))
