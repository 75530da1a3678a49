"""Rank 0's side of the group: it forms it, sends each rank the batches, and ends if another rank ends.

A rank that ends while the others run leaves them without its part of the work, so the engine process ends too. Its
supervisor then fails the requests and starts it again, with all ranks.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import msgspec
import torch

from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.core.ports import ForwardPass, PendingOutput, Runner
from quire_engine.errors import GROUP_LOST, EngineStartError
from quire_engine.group_secret import read_secret
from quire_engine.runner.arithmetic import Arithmetic, dtype_name
from quire_engine.runner.cache_size import CacheSize
from quire_engine.runner.device_budget import DeviceUse
from quire_engine.runner.memory import AvailableMemory
from quire_engine.runner.parallel.agreement import membership
from quire_engine.runner.parallel.collectives import CPU, RankLinks, join_process_group
from quire_engine.runner.parallel.local_ranks import LocalRanks, share_memory
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Channel,
    Connect,
    FromRank,
    GlooChannel,
    Loaded,
    Measure,
    Measured,
    RankRefused,
    Sample,
    Sampled,
    SocketChannel,
    StepMessage,
    ToRank,
    encode,
)
from quire_engine.runner.parallel.node import GroupEnded, NodeWatch
from quire_engine.runner.parallel.rendezvous import gather, wait_until_read
from quire_engine.runner.parallel.store import GroupStore, StoreLost, first_line, host_store
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.threads import ALWAYS_SHARED, SharedFrom
from quire_kernels.dispatch import runs_triton

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0


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
        self._timeout_seconds = parallel.join_timeout_seconds
        self._topology = topology_of(parallel)
        on_device = runs_triton(device.type)
        self._samplers: range | tuple[int, ...] = (self._topology.sampler,)
        if on_device and self._topology.stages == 1:
            # All ranks sample, so that a step may begin before the host knows the tokens of the one before.
            self._samplers = range(self._topology.ranks)
        self.on_lost: Callable[[str], None] = _end_process
        """It is called in another thread if a rank or a node is lost after ``allocate``."""
        self._running = self._connecting = self._ended = False
        self._channels: dict[int, Channel] = {}
        self._local = LocalRanks(config, lambda reason: self._lost(reason, silent=False))
        self._nodes = range(1, parallel.nodes)
        self._watch: NodeWatch | None = None
        self._rank_watches: list[threading.Thread] = []
        self._store: GroupStore | None = None
        self._links: RankLinks | None = None
        silence_seconds = config.engine_process.hang_timeout_seconds
        if self._nodes:
            secret = read_secret(parallel, os.environ)
            self._store = gather(parallel, membership(config), secret, silence_seconds)
        elif on_device or parallel.pipeline > 1:
            self._store = host_store()
        try:
            place = None if self._store is None else self._store.place
            memories = share_memory(self._topology, 0)
            in_order = config.device.deterministic
            memory = memories.pop(0)
            self._links = RankLinks(self._topology, 0, device, memory=memory, place=place, in_order=in_order)
            for rank, shared in memories.items():
                here, there = socket.socketpair()
                self._channels[rank] = SocketChannel(here)
                self._local.start(rank, memory=shared, place=place, connection=there)
            if self._nodes:
                assert self._store is not None
                self._watch = NodeWatch(self._store, 0, self._nodes, self._lost, silence_seconds, self._look)
                self._connect_nodes(self._store)
        except OSError as error:
            self.close()
            raise EngineStartError(f"the ranks cannot be started: {error}") from error
        except (RuntimeError, StoreLost) as error:
            self.close()
            reason = first_line(error)
            raise EngineStartError(f"the ranks of other nodes cannot be reached: {reason}") from error
        except BaseException:
            self.close()
            raise

    @property
    def links(self) -> RankLinks:
        """The connections of rank 0 to those with which it computes."""
        assert self._links is not None, "every group has them"
        return self._links

    def _connect_nodes(self, store: GroupStore) -> None:
        """Connect to the ranks of other nodes, which get their batches over gloo."""
        self._connecting = True
        ranks, timeout = self._topology.steps_group, timedelta(seconds=self._timeout_seconds)
        group = join_process_group(
            "steps", ranks, 0, CPU, store=store.place.connect(), own=store.place.own, timeout=timeout
        )
        for rank in ranks[1:]:
            channel = self._channels[rank] = GlooChannel(group, ranks.index(rank))
            watch = threading.Thread(target=self._watch_rank, args=(rank, channel), name=f"rank {rank}", daemon=True)
            watch.start()
            self._rank_watches.append(watch)
        self._connecting = False

    def _watch_rank(self, rank: int, channel: GlooChannel) -> None:
        how, node = channel.await_end(), self._topology.node_of(rank)
        self._lost(
            f"rank {rank} of {self._topology.ranks} on node {node} is gone, whose log has the reason ({how})",
            silent=False,
        )

    def _look(self) -> None:
        """Read whether another node cannot go on."""
        assert self._store is not None
        for node in self._nodes:
            if self._store.has(f"left/{node}"):
                reason = f"node {node}: {self._store.get(f'left/{node}').decode()}"
                self._lost(reason, silent=self._connecting)

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
        for rank in self._channels:
            message = self._receive(rank)
            if isinstance(message, RankRefused):
                reason = f"rank {rank} of {self._topology.ranks}: {message.message}"
                self._end_nodes(reason, message.exit_code)
                raise EngineStartError(reason, message.exit_code)
            assert isinstance(message, Loaded), "a rank reports its weights first"
            total += message.weight_bytes
        return total

    def memory_elsewhere(self) -> AvailableMemory | None:
        """Return the memory of the other node that has the least; None without other nodes, or if it is unknown."""
        ranks = [self._topology.ranks_of(node)[0] for node in self._nodes]
        found = [measured.available for measured in self._measure(ranks) if measured.available is not None]
        return min(found, key=lambda available: available.size, default=None)

    def measure_devices(self, measure_own: Callable[[], DeviceUse]) -> list[DeviceUse]:
        """Let every rank measure its GPU at the same time, this one by ``measure_own``. Return their uses, by rank."""
        own: list[DeviceUse] = []
        found = self._measure(self._channels, lambda: own.append(measure_own()))
        return [*own, *(measured.use for measured in found if measured.use is not None)]

    def _measure(self, ranks: Iterable[int], meanwhile: Callable[[], None] = lambda: None) -> list[Measured]:
        """Return what ranks measure at the same time."""
        frame = encode(Measure())
        for rank in ranks:
            self._send_encoded(rank, frame)
        meanwhile()
        found = []
        for rank in ranks:
            message = self._receive(rank)
            assert isinstance(message, Measured), "a rank answers each question"
            found.append(message)
        return found

    def connect(self) -> None:
        """Let ranks connect to those with which they exchange data; from now on the loss of a rank is final.

        Raise EngineStartError if they cannot.
        """
        self._running = True
        self._broadcast(Connect())
        try:
            self.links.connect(self._timeout_seconds)
        except (RuntimeError, StoreLost) as error:
            raise EngineStartError(f"the ranks cannot connect to each other: {first_line(error)}") from error

    def allocate(self, size: CacheSize, shared_from: SharedFrom = ALWAYS_SHARED) -> None:
        """Let every rank allocate its KV cache, and connect ranks that are not yet; the loss of a rank is final."""
        if not self._running:
            self.connect()
        self._broadcast(Allocate(size=size, shared_asleep=shared_from.asleep, shared_spinning=shared_from.spinning))

    def formed(self) -> None:
        """Let the other nodes know that the group runs."""
        if self._nodes:
            assert self._store is not None
            self._store.set("runs", b"1")

    def send(self, batch: Batch) -> None:
        """Let every rank run a batch; what only sampling needs goes to ranks that sample."""
        whole = encode(StepMessage(replace(batch, constrained=None)))
        stripped = whole if not batch.admitted else encode(StepMessage(replace(batch, admitted=[], constrained=None)))
        for rank in self._channels:
            self._send_encoded(rank, whole if rank in self._samplers else stripped)

    def sample(self, masks: TokenMasks | None) -> None:
        """Let the other ranks that sample do so after the batch that was sent last."""
        others = [rank for rank in self._channels if rank in self._samplers]
        frame = encode(Sample(masks)) if others else b""
        for rank in others:
            self._send_encoded(rank, frame)

    def await_sampled(self) -> RunnerOutput:
        """Return the tokens of the oldest ``sample`` whose tokens were not returned."""
        message = self._receive(self._topology.sampler)
        assert isinstance(message, Sampled), "a rank that samples sends nothing else"
        return message.output

    def _receive(self, rank: int) -> FromRank:
        frame = self._channels[rank].receive()
        if frame is None:
            raise EngineStartError(
                f"the engine process lost another rank of its group: rank {rank} of {self._topology.ranks}"
                f" {self._local.why_ended(rank)}; the log above has its messages"
            )
        message: FromRank = msgspec.msgpack.decode(frame, type=FromRank)
        return message

    def _broadcast(self, message: ToRank) -> None:
        frame = encode(message)
        for rank in self._channels:
            self._send_encoded(rank, frame)

    def _send_encoded(self, rank: int, frame: bytes) -> None:
        try:
            self._channels[rank].send(frame)
        except OSError as error:
            raise EngineStartError(
                f"the engine process lost another rank of its group: rank {rank} of {self._topology.ranks}: {error}"
            ) from error

    def _end_nodes(self, reason: str, exit_code: int) -> None:
        """Let the other nodes know once why the group ends, and wait until they do."""
        if self._nodes and self._store is not None and not self._ended:
            self._ended = True
            with contextlib.suppress(StoreLost):
                self._store.set("ended", encode(GroupEnded(reason, exit_code)))
                wait_until_read(self._store, [f"read/{node}" for node in self._nodes])

    def close(self) -> None:
        """End the ranks, and let the other nodes know."""
        self._running = False
        if self._watch is not None:
            self._watch.close()
        self._end_nodes("node 0 has ended the group; its log has the reason", 1)
        for channel in self._channels.values():
            channel.close()
        if self._links is not None:
            self._links.close()
        self._local.close()
        for watch in self._rank_watches:
            watch.join(_CLOSE_SECONDS)  # a thread inside gloo must not meet the end of the interpreter


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
