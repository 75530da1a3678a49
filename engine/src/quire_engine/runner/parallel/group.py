"""Rank 0's side of the group: it forms it, sends each rank the batches, and ends if another rank ends.

A rank that ends while the others run leaves them without its part of the work, so the engine process ends too. Its
supervisor then fails the requests and starts it again, with all ranks.
"""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.core.ports import ForwardPass, PendingOutput, Runner
from quire_engine.errors import GROUP_LOST, EngineError, EngineStartError
from quire_engine.group_secret import read_secret
from quire_engine.runner.arithmetic import Arithmetic, dtype_name
from quire_engine.runner.cache_size import CacheSize
from quire_engine.runner.device_budget import DeviceUse
from quire_engine.runner.memory import AvailableMemory
from quire_engine.runner.parallel.agreement import membership
from quire_engine.runner.parallel.device_group import DeviceRanks
from quire_engine.runner.parallel.interfaces import choose_interface
from quire_engine.runner.parallel.links import CPU, RankLinks, connect_links
from quire_engine.runner.parallel.local_ranks import LocalRanks, open_sockets
from quire_engine.runner.parallel.meeting import Connections, gather, refuse_nodes
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Connect,
    Formed,
    Frames,
    FromRank,
    Loaded,
    MeasureDevice,
    MeasuredMemory,
    MeasureMemory,
    Memory,
    RankRefused,
    Sample,
    Sampled,
    StepMessage,
    ToRank,
    encode,
)
from quire_engine.runner.parallel.node_watch import NodeWatch
from quire_engine.runner.parallel.streams import RankConnection
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.threads import ALWAYS_SHARED, SharedFrom
from quire_kernels.dispatch import runs_triton

_log = logging.getLogger(__name__)


def _end_process(reason: str) -> None:
    os._exit(GROUP_LOST)


class RankGroup:
    """The other ranks, which run on this node and on others."""

    def __init__(self, config: EngineConfig, device: torch.device = CPU, *, gpu: str | None = None) -> None:
        """Wait for the other nodes and start the ranks of this one. Raise StartError or FlagsError if it fails.

        device  the device of rank 0
        gpu     the name of the GPU; the other ranks choose one of the same kind on their nodes. None means CPUs.
        """
        parallel = config.parallel
        self._gpu = gpu
        self._connect_seconds = parallel.join_timeout_seconds
        self._topology = topology_of(parallel)
        self._samplers: range | tuple[int, ...] = (self._topology.sampler,)
        if runs_triton(device.type) and self._topology.stages == 1:
            # All ranks sample, so that a step may begin before the host knows the tokens of the one before.
            self._samplers = range(self._topology.ranks)
        self.on_lost: Callable[[str], None] = _end_process
        """It is called in another thread if a rank or a node is lost after ``allocate``."""
        self._running = False
        self._frames: dict[int, Frames] = {}
        self._local = LocalRanks(config, lambda reason: self._lost(reason, silent=False))
        self._nodes: dict[int, Frames] = {}
        self._watch: NodeWatch | None = None
        self._streams: tuple[RankConnection, ...] = ()
        self._devices: DeviceRanks | None = None
        met = Connections()
        if parallel.nodes > 1:
            met = gather(parallel, membership(config), read_secret(parallel, os.environ))
        try:
            self._nodes = met.nodes
            self._frames = {rank: Frames(connection) for rank, connection in met.ranks.items()}
            for frames in self._nodes.values():
                choose_interface(frames.stream)
            sockets = open_sockets(self._topology, 0, met.streams)
            self.links: RankLinks = connect_links(
                self._topology, 0, sockets.pop(0), device, in_order=config.device.deterministic
            )
            self._streams, self._devices = self.links.streams, self.links.devices
            for rank, own in sockets.items():
                here, there = socket.socketpair()
                self._frames[rank] = Frames(here)
                self._local.start(rank, there, own)
            if self._nodes:
                self._watch = NodeWatch(self._nodes, self._lost, config.engine_process.hang_timeout_seconds)
        except OSError as error:
            self.close()
            raise EngineStartError(f"the ranks cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _lost(self, reason: str, *, silent: bool) -> None:
        # Until the group runs, the end of a connection is noticed where a message is waited for, with its reason.
        if self._running or silent:
            _log.error("%s, which ends the other ranks too", reason)
            self.on_lost(reason)

    def begin(self, arithmetic: Arithmetic) -> None:
        """Let the other ranks load their parts of the model, with the same arithmetic. Raise StartError."""
        self._broadcast(Begin(gpu=self._gpu, dtype=dtype_name(arithmetic.dtype), backend=arithmetic.backend.name))

    def await_loaded(self) -> int:
        """Wait until every rank has its weights, and return their bytes. Raise StartError if a rank cannot load."""
        total = 0
        for rank in self._frames:
            message = self._receive(rank)
            if isinstance(message, RankRefused):
                reason = f"rank {rank} of {self._topology.ranks}: {message.message}"
                refuse_nodes(self._nodes, reason, message.exit_code)
                raise EngineStartError(reason, message.exit_code)
            assert isinstance(message, Loaded), "a rank reports its weights first"
            total += message.weight_bytes
        return total

    def memory_elsewhere(self) -> AvailableMemory | None:
        """Return the memory of the other node that has the least; None without other nodes, or if it is unknown."""
        found = []
        for node in self._nodes:
            rank = self._topology.ranks_of(node)[0]
            self._send_encoded(rank, encode(MeasureMemory()))
            message = self._receive(rank)
            assert isinstance(message, Memory), "a rank answers each question"
            if message.available is not None:
                found.append(message.available)
        return min(found, key=lambda available: available.size, default=None)

    def connect(self) -> None:
        """Let ranks on GPUs meet; from now on the loss of a rank is final.

        Raise EngineStartError if they cannot meet.
        """
        assert self._devices is not None, "ranks on CPUs are connected when they start"
        self._running = True
        self._broadcast(Connect())
        try:
            self._devices.connect(self._connect_seconds)
        except RuntimeError as error:
            raise EngineStartError(f"the ranks cannot connect their GPUs: {error}") from error

    def measure_devices(self, measure_own: Callable[[], DeviceUse]) -> list[DeviceUse]:
        """Let every rank measure its GPU at the same time, this one by ``measure_own``. Return their uses, by rank."""
        self._broadcast(MeasureDevice())
        found = [measure_own()]
        for rank in self._frames:
            message = self._receive(rank)
            assert isinstance(message, MeasuredMemory), "a rank answers each question"
            found.append(message.use)
        return found

    def allocate(self, size: CacheSize, shared_from: SharedFrom = ALWAYS_SHARED) -> None:
        """Let every rank allocate its KV cache; from now on the loss of a rank is final."""
        self._running = True
        self._broadcast(Allocate(size=size, shared_asleep=shared_from.asleep, shared_spinning=shared_from.spinning))

    def formed(self) -> None:
        """Let the other nodes know that the group runs."""
        for node, frames in self._nodes.items():
            try:
                frames.send(Formed())
            except OSError as error:
                raise EngineError(f"node {node} is gone: {error}") from error

    def send(self, batch: Batch) -> None:
        """Let every rank run a batch; what only sampling needs goes to ranks that sample."""
        whole = encode(StepMessage(replace(batch, constrained=None)))
        stripped = whole if not batch.admitted else encode(StepMessage(replace(batch, admitted=[], constrained=None)))
        for rank in self._frames:
            self._send_encoded(rank, whole if rank in self._samplers else stripped)

    def sample(self, masks: TokenMasks | None) -> None:
        """Let the other ranks that sample do so after the batch that was sent last."""
        others = [rank for rank in self._frames if rank in self._samplers]
        frame = encode(Sample(masks)) if others else b""
        for rank in others:
            self._send_encoded(rank, frame)

    def await_sampled(self) -> RunnerOutput:
        """Return the tokens of the oldest ``sample`` whose tokens were not returned."""
        message = self._receive(self._topology.sampler)
        assert isinstance(message, Sampled), "a rank that samples sends nothing else"
        return message.output

    def _receive(self, rank: int) -> FromRank:
        frame = self._frames[rank].receive()
        if frame is None:
            raise EngineStartError(
                f"the engine process lost another rank of its group: rank {rank} of {self._topology.ranks}"
                f" {self._local.why_ended(rank)}; the log above has its messages"
            )
        message: FromRank = msgspec.msgpack.decode(frame, type=FromRank)
        return message

    def _broadcast(self, message: ToRank) -> None:
        frame = encode(message)
        for rank in self._frames:
            self._send_encoded(rank, frame)

    def _send_encoded(self, rank: int, frame: bytes) -> None:
        try:
            self._frames[rank].send_encoded(frame)
        except OSError as error:
            raise EngineStartError(
                f"the engine process lost another rank of its group: rank {rank} of {self._topology.ranks}: {error}"
            ) from error

    def close(self) -> None:
        """End the ranks, and let the other nodes know."""
        self._running = False
        if self._watch is not None:
            self._watch.close()
        refuse_nodes(self._nodes, "node 0 has ended the group; its log has the reason", 1)
        for stream in self._streams:
            stream.close()
        for frames in self._frames.values():
            frames.close()
        if self._devices is not None:
            self._devices.close()
        self._local.close()


class GroupRunner:
    """A ``core.ports.Runner`` that lets the other ranks of its stage, the only one, run each batch too.

    On GPUs all ranks sample: the logits have the same bits on all of them, and sampling depends on them, the seed and
    the position only. So no token is sent between GPUs, and a step may begin before the host knows the tokens of the
    one before.
    """

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group

    def execute(self, batch: Batch) -> "GroupForward":
        self._group.send(batch)
        return GroupForward(self._runner.execute(batch), self._group)

    def close(self) -> None:
        self._group.close()
        self._runner.close()


@dataclass(frozen=True, slots=True)
class GroupForward:
    """A ``ForwardPass`` of all ranks of one stage."""

    forward: ForwardPass
    group: RankGroup

    @property
    def token_ids(self) -> list[int]:
        return self.forward.token_ids

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        self.group.sample(masks)
        return self.forward.sample(masks)


class Stage(Protocol):
    """The runner of a rank that does not sample."""

    def execute(self, batch: Batch) -> object: ...

    def close(self) -> None: ...


class PipelineRunner:
    """A ``core.ports.Runner`` that runs the first stage itself; the last one samples.

    ``execute`` returns when the first stage is done, or issued on a GPU, so that the next step can begin there while
    the other stages run.
    """

    def __init__(self, stage: Stage, group: RankGroup) -> None:
        self._stage = stage
        self._group = group

    def execute(self, batch: Batch) -> "StagedStep":
        self._group.send(batch)
        self._stage.execute(batch)
        return StagedStep(self._group, batch)

    def close(self) -> None:
        self._group.close()
        self._stage.close()


class StagedStep:
    """The ``ForwardPass`` and the ``PendingOutput`` of a step in several stages."""

    def __init__(self, group: RankGroup, batch: Batch) -> None:
        self._group = group
        self._batch = batch

    @property
    def token_ids(self) -> list[int]:
        return self._batch.token_ids

    def sample(self, masks: TokenMasks | None = None) -> "StagedStep":
        self._group.sample(masks)
        return self

    def wait(self) -> RunnerOutput:
        return self._group.await_sampled()
