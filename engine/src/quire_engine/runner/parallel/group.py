"""Rank 0's side of the ranks on this machine: it starts them, sends them each batch, and ends if one of them ends.

A rank that ends while the others run leaves them without its part of a sum, so the engine process ends too. Its
supervisor then fails the requests and starts it again, with all ranks.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec

from quire_engine import config_json
from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import ForwardPass, Runner
from quire_engine.errors import EngineStartError, StartError
from quire_engine.model.divided import Links
from quire_engine.model.model_part import ModelPart
from quire_engine.runner.arithmetic import Arithmetic, dtype_name
from quire_engine.runner.parallel.messages import Allocate, Begin, Frames, FromRank, Loaded, Refused, Step
from quire_engine.runner.parallel.shared_memory import SharedMemoryGroup, create_memory
from quire_engine.runner.threads import SharedFrom

_log = logging.getLogger(__name__)
_STDERR = 2
_CLOSE_SECONDS = 5.0


def _end_process(reason: str) -> None:
    os._exit(1)


class RankGroup:
    """The other ranks of this machine, which rank 0 has started."""

    def __init__(self, config: EngineConfig, arithmetic: Arithmetic) -> None:
        """Start the ranks, which load their parts of the model meanwhile. Raise StartError if that is impossible."""
        self._ranks = config.parallel.ranks
        self.on_lost: Callable[[str], None] = _end_process
        """It is called in another thread if a rank ends after ``allocate``."""
        self._encoder = msgspec.msgpack.Encoder()
        self._children: list[subprocess.Popen[bytes]] = []
        self._frames: list[Frames] = []
        self._running = False
        self._closing = False
        try:
            memory = create_memory(self._ranks)
        except (OSError, AttributeError) as error:
            raise EngineStartError(f"the ranks cannot share memory: {error}; tensor parallelism needs Linux") from error
        try:
            tensor = SharedMemoryGroup(memory, rank=0, ranks=self._ranks)
            begin = config_json.encode(
                Begin(config=config, dtype=dtype_name(arithmetic.dtype), backend=arithmetic.backend.name)
            )
            for rank in range(1, self._ranks):
                self._spawn(rank, memory)
            for frames in self._frames:
                frames.send(begin)
        except OSError as error:
            self.close()
            raise EngineStartError(f"the ranks cannot be started: {error}") from error
        finally:
            os.close(memory)
        self.links = Links(part=ModelPart(tensor_rank=0, tensor_size=self._ranks), tensor=tensor)

    def _spawn(self, rank: int, memory: int) -> None:
        own, other = socket.socketpair()
        with other:
            child = subprocess.Popen(
                # Modules of the working directory are not imported.
                (
                    *(sys.executable, "-P", "-m", "quire_engine.runner.parallel.rank"),
                    *map(str, (rank, self._ranks, other.fileno(), memory, os.getpid())),
                ),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=(other.fileno(), memory),
            )
        self._children.append(child)
        self._frames.append(Frames(own))
        threading.Thread(target=self._watch, args=(rank, child), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        status = child.wait()
        if self._running and not self._closing:
            reason = f"rank {rank} of {self._ranks} {_ended(status)}, which ends the other ranks too"
            _log.error("%s", reason)
            self.on_lost(reason)

    def await_loaded(self) -> int:
        """Wait until every rank has its weights, and return their bytes. Raise StartError if a rank cannot load."""
        total = 0
        for rank, frames in enumerate(self._frames, start=1):
            frame = frames.receive()
            if frame is None:
                status = self._children[rank - 1].wait()
                raise EngineStartError(f"rank {rank} of {self._ranks} {_ended(status)}; its own words are above")
            message: Loaded | Refused = msgspec.msgpack.decode(frame, type=FromRank)
            if isinstance(message, Refused):
                error = EngineStartError(f"rank {rank} of {self._ranks}: {message.message}", message.exit_code)
                raise error
            total += message.weight_bytes
        return total

    def allocate(self, layout: KVCacheLayout, max_model_len: int, shared_from: SharedFrom) -> None:
        """Let every rank allocate its KV cache; from now on the loss of a rank is final."""
        message = Allocate(
            layout=layout,
            max_model_len=max_model_len,
            shared_asleep=shared_from.asleep,
            shared_spinning=shared_from.spinning,
        )
        self._running = True
        self._broadcast(self._encoder.encode(message))

    def send(self, batch: Batch) -> None:
        """Let every rank run a batch, of which only rank 0 samples."""
        self._broadcast(self._encoder.encode(Step(replace(batch, admitted=[], constrained=None))))

    def _broadcast(self, frame: bytes) -> None:
        for rank, frames in enumerate(self._frames, start=1):
            try:
                frames.send(frame)
            except OSError as error:
                raise StartError(f"rank {rank} of {self._ranks} is gone: {error}") from error

    def close(self) -> None:
        """End the ranks."""
        self._closing = True
        for frames in self._frames:
            frames.close()
        for child in self._children:
            try:
                child.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"


class GroupRunner:
    """A ``core.ports.Runner`` that lets the other ranks run each batch too."""

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group

    def execute(self, batch: Batch) -> ForwardPass:
        self._group.send(batch)
        return self._runner.execute(batch)

    def close(self) -> None:
        self._group.close()
        self._runner.close()
