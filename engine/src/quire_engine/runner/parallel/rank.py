"""The process of a rank other than 0: it loads its part of the model and runs the batches that rank 0 sends.

Started by ``runner.parallel.local_ranks`` as ``python -m quire_engine.runner.parallel.rank``, with the configuration of
its node as a line of standard input. Rank 0 names the device on which all ranks compute. The first rank of the last
stage samples, unless that is rank 0; on GPUs with one stage all ranks do. It ends when rank 0 closes the connection, or
when the process that started it ends, whatever it is doing.
"""

import argparse
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from quire_common.errors import ConfigurationError
from quire_common.logs import set_up_logging
from quire_engine import config_json
from quire_engine.config import EngineConfig
from quire_engine.errors import EngineStartError, StartError
from quire_engine.runner.device_choice import FoundDevices, NoDevice, OnGpu, choose_device
from quire_engine.runner.device_search import find_devices
from quire_engine.runner.parallel.links import CPU, RankLinks, connect_links
from quire_engine.runner.parallel.local_ranks import Sockets
from quire_engine.runner.parallel.messages import Begin, Frames, Loaded, RankRefused
from quire_engine.runner.parallel.streams import StreamLost
from quire_engine.runner.parallel.topology import topology_of

if TYPE_CHECKING:
    from quire_engine.runner.parallel.cpu_rank import CpuRank
    from quire_engine.runner.parallel.device_rank import DeviceRank

_log = logging.getLogger(__name__)


def serve(config: EngineConfig, frames: Frames, rank: int, sockets: Sockets) -> int:
    """Load, run batches until rank 0 closes the connection, and return the exit status."""
    frame = frames.receive()
    if frame is None:
        return 0
    begin = msgspec.msgpack.decode(frame, type=Begin)
    try:
        device = find_place(config, begin.gpu, rank)
        links = connect_links(topology_of(config.parallel), rank, sockets, device, in_order=config.device.deterministic)
        loaded = _load(config, begin, rank, links, device)
    except (StartError, ConfigurationError) as error:
        frames.send(RankRefused(message=str(error), exit_code=error.exit_code))
        return 1
    frames.send(Loaded(weight_bytes=loaded.weight_bytes))
    loaded.run(frames)
    return 0


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


def _load(
    config: EngineConfig, begin: Begin, rank: int, links: RankLinks, device: torch.device
) -> "CpuRank | DeviceRank":
    """Return the rank with its weights. Raise StartError or ConfigurationError if they cannot be served."""
    if links.devices is not None:
        from quire_engine.runner.parallel.device_rank import DeviceRank  # needs Triton

        return DeviceRank(config, begin, links.links, links.devices, device, rank=rank)
    from quire_engine.runner.parallel.cpu_rank import CpuRank  # needs numba

    return CpuRank(config, begin, links, samples=rank == topology_of(config.parallel).sampler)


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
    for name in ("rank", "parent", "connection"):
        parser.add_argument(name, type=int)
    parser.add_argument("sockets", type=lambda text: msgspec.json.decode(text, type=Sockets))
    arguments = parser.parse_args()
    _end_with(arguments.parent)
    config = config_json.decode(sys.stdin.buffer.readline(), EngineConfig)
    name = multiprocessing.current_process().name = f"rank {arguments.rank}"
    set_up_logging(config.log.level, config.log.format, process=name)
    frames = Frames(socket.socket(fileno=arguments.connection))
    try:
        return serve(config, frames, arguments.rank, arguments.sockets)
    except (StreamLost, StartError, OSError) as error:
        _log.error("rank %d ends: %s", arguments.rank, error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
