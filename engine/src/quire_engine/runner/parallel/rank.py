"""The process of a rank other than 0: it loads its part of the model and runs the batches that rank 0 sends.

Started by ``runner.parallel.local_ranks`` as ``python -m quire_engine.runner.parallel.rank``, with the configuration of
its node as a line of standard input. Rank 0 names the device on which all ranks compute. The first rank of the last
stage samples, unless that is rank 0; on GPUs with one stage all ranks do. It ends when rank 0 closes the connection, or
when the process that started it ends, whatever it is doing.
"""

import argparse
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec
import torch

from quire_common.errors import ConfigurationError
from quire_common.logs import set_up_logging
from quire_engine import config_json
from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.ports import PendingOutput
from quire_engine.errors import EngineError, EngineStartError, StartError
from quire_engine.runner.accelerator import Mark
from quire_engine.runner.device_choice import FoundDevices, NoDevice, OnGpu, choose_device
from quire_engine.runner.device_search import find_devices
from quire_engine.runner.parallel.collectives import CPU, RankLinks, join_process_group
from quire_engine.runner.parallel.local_ranks import Given
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Channel,
    Connect,
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
from quire_engine.runner.parallel.store import StoreLost, first_line
from quire_engine.runner.parallel.topology import topology_of
from quire_kernels.dispatch import runs_triton

_log = logging.getLogger(__name__)
_MOST_IN_FLIGHT = 2
"""With one stage, rank 0 has as many steps in flight at most, and the buffers of a runner are for as many."""


class RankRunner(Protocol):
    def execute(self, batch: Batch) -> Any:
        """Run this rank's part of the model; on a rank that samples, return the ``ForwardPass``."""
        ...

    def close(self) -> None: ...


class LoadedRank(Protocol):
    """A rank with its weights. Its creation raises StartError or ConfigurationError if they cannot be served."""

    @property
    def weight_bytes(self) -> int: ...

    def measure(self) -> Measured: ...

    def allocate(self, message: Allocate) -> RankRunner:
        """Return the runner, with its KV cache."""
        ...


def serve(config: EngineConfig, channel: Channel, rank: int, given: Given) -> int:
    """Load, run batches until rank 0 closes the connection, and return the exit status."""
    frame = channel.receive()
    if frame is None:
        return 0
    begin = msgspec.msgpack.decode(frame, type=Begin)
    topology = topology_of(config.parallel)
    try:
        device = find_place(config, begin.gpu, rank)
        in_order = config.device.deterministic
        links = RankLinks(topology, rank, device, memory=given.memory, place=given.place, in_order=in_order)
        loaded = _load(config, begin, rank, links, device)
    except (StartError, ConfigurationError) as error:
        channel.send(encode(RankRefused(message=str(error), exit_code=error.exit_code)))
        while channel.receive() is not None:
            pass  # rank 0 closes the connection when it has the message
        return 1
    channel.send(encode(Loaded(weight_bytes=loaded.weight_bytes)))
    answers = topology.stages > 1 and rank == topology.sampler
    sender = Sender(channel, device) if answers else None
    runner = run(loaded, channel, links, sender, config.parallel.join_timeout_seconds)
    if sender is not None:
        sender.close()
    if runner is not None:
        runner.close()
    links.close()
    return 0


def run(
    loaded: LoadedRank, channel: Channel, links: RankLinks, sender: "Sender | None", connect_seconds: float
) -> RankRunner | None:
    """Run batches until rank 0 closes the connection, and return the runner. Raise StartError if the GPU fails.

    sender  sends the tokens of steps to rank 0; None if rank 0 samples itself
    """
    decoder = msgspec.msgpack.Decoder(ToRank)
    runner: RankRunner | None = None
    forward: Any = None
    pending: deque[PendingOutput] = deque()
    while (frame := channel.receive()) is not None:
        message: ToRank = decoder.decode(frame)
        match message:
            case Connect():
                _connect(links, connect_seconds)
            case Measure():
                channel.send(encode(loaded.measure()))
            case Allocate():
                runner = loaded.allocate(message)
                # Objects from loading stay alive, so the garbage collector need not visit them between steps.
                gc.collect()
                gc.freeze()
            case StepMessage(batch):
                assert runner is not None, "a batch before the KV cache"
                # A fault of the GPU is raised here.
                while len(pending) >= _MOST_IN_FLIGHT:
                    pending.popleft().wait()
                forward = runner.execute(batch)
            case Sample(masks):
                assert forward is not None, "sampling before a batch"
                sampled = forward.sample(masks)
                if sender is None:
                    pending.append(sampled)
                else:
                    sender.add(sampled, links.waited)
    return runner


def _connect(links: RankLinks, seconds: float) -> None:
    try:
        links.connect(seconds)
    except (RuntimeError, StoreLost) as error:
        raise EngineStartError(f"the ranks cannot connect to each other: {first_line(error)}") from error


class Sender:
    """It sends the tokens of each step to rank 0: on a GPU in a thread, which waits while further steps are issued."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._steps: SimpleQueue[tuple[PendingOutput, tuple[Mark, Mark] | None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if runs_triton(device.type):
            self._thread = threading.Thread(target=self._run, name="sends tokens", daemon=True)
            self._thread.start()

    def add(self, pending: PendingOutput, wait: tuple[Mark, Mark] | None) -> None:
        """Send the tokens of a step; ``wait`` are the marks around its wait for the stage before."""
        if self._thread is None:
            self._send(pending, wait)
        else:
            self._steps.put((pending, wait))

    def close(self) -> None:
        """Wait for the steps that were added."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join()

    def _send(self, pending: PendingOutput, wait: tuple[Mark, Mark] | None) -> None:
        output = pending.wait()
        # The time for which this stage waited for the one before is not its own.
        waited = 0.0 if wait is None else wait[1].seconds_since(wait[0])
        self._channel.send(encode(Sampled(replace(output, run_seconds=max(0.0, output.run_seconds - waited)))))

    @torch.inference_mode()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (step := self._steps.get()) is not None:
            try:
                self._send(*step)
            except (EngineError, RuntimeError, OSError) as error:
                # The end of the process shows rank 0 that this rank is gone, whatever the other thread waits for.
                _log.error("the rank ends: %s", error)
                os._exit(1)


def find_place(
    config: EngineConfig, gpu: str | None, rank: int, find: Callable[[], FoundDevices] = find_devices
) -> torch.device:
    """Return the device of a rank: one of its node's GPUs of the kind ``gpu``, or the CPU if that is None.

    Raise EngineStartError if the node has too few of them.
    """
    if gpu is None:
        return CPU
    topology = topology_of(config.parallel)
    node = topology.node_of(rank)
    chosen = choose_device(config.device.device, find, len(topology.ranks_of(node)), needed_by=config.parallel.flags)
    if not isinstance(chosen, OnGpu):
        why = chosen.message if isinstance(chosen, NoDevice) else chosen.reason
        raise EngineStartError(f"rank 0 computes on {gpu}, and node {node} cannot: {why}", 2)
    if chosen.gpu.name != gpu:
        raise EngineStartError(
            f"rank 0 computes on {gpu}, and node {node} would on {chosen.gpu.name}: all ranks need GPUs of one kind;"
            " choose those of each node with CUDA_VISIBLE_DEVICES",
            2,
        )
    own = (chosen.gpu, *chosen.others)[rank - topology.ranks_of(node)[0]]
    return torch.device("cuda", own.index)


def _load(config: EngineConfig, begin: Begin, rank: int, links: RankLinks, device: torch.device) -> LoadedRank:
    """Return the rank with its weights. Raise StartError or ConfigurationError if they cannot be served."""
    if runs_triton(device.type):
        from quire_engine.runner.parallel.device_rank import DeviceRank  # needs Triton

        return DeviceRank(config, begin, links.links, device, rank=rank)
    from quire_engine.runner.parallel.cpu_rank import CpuRank  # needs numba

    return CpuRank(config, begin, links.links, rank=rank)


def connect_to_rank_0(config: EngineConfig, rank: int, given: Given) -> Channel:
    """Return the channel over which batches come. Raise EngineStartError if rank 0 cannot be reached."""
    if given.connection is not None:
        return SocketChannel(socket.socket(fileno=given.connection))
    assert given.place is not None, "a rank of another node has the store"
    ranks = topology_of(config.parallel).steps_group
    timeout = timedelta(seconds=config.parallel.join_timeout_seconds)
    try:
        store, own = given.place.connect(), given.place.own
        group = join_process_group("steps", ranks, rank, CPU, store=store, own=own, timeout=timeout)
    except (RuntimeError, StoreLost) as error:
        raise EngineStartError(f"rank 0 cannot be reached: {first_line(error)}") from error
    return GlooChannel(group, 0)


def _end_with(parent: int) -> None:
    """End this process when ``parent``, which started it, ends, even while it is stopped or waits for another rank."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def main() -> int:
    # Ctrl-C and a stop of the whole group reach this process too; rank 0 ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="A rank of quire-engine, which starts it itself; run quire-engine.")
    parser.add_argument("rank", type=int)
    parser.add_argument("given", type=lambda text: msgspec.json.decode(text, type=Given))
    arguments = parser.parse_args()
    _end_with(arguments.given.parent)
    config = config_json.decode(sys.stdin.buffer.readline(), EngineConfig)
    name = multiprocessing.current_process().name = f"rank {arguments.rank}"
    set_up_logging(config.log.level, config.log.format, process=name)
    try:
        channel = connect_to_rank_0(config, arguments.rank, arguments.given)
        return serve(config, channel, arguments.rank, arguments.given)
    except (EngineError, OSError) as error:
        _log.error("rank %d ends: %s", arguments.rank, error)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # The threads of gloo and NCCL may wait for ranks that are lost.
    os._exit(status)
