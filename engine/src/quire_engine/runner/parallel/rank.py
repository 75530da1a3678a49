"""The process of a rank other than 0: it loads its part of the model and runs the batches that rank 0 sends.

Started by ``runner.parallel.local_ranks`` as ``python -m quire_engine.runner.parallel.rank``, with the configuration of
its node as a line of standard input. The first rank of the last stage samples, unless that is rank 0. It ends when rank
0 closes the connection, or when the process that started it ends, whatever it is doing.
"""

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from dataclasses import replace

import msgspec
import torch

from quire_common.errors import ConfigurationError
from quire_common.logs import set_up_logging
from quire_engine import config_json
from quire_engine.config import EngineConfig
from quire_engine.errors import StartError
from quire_engine.model.candidate import BuildOptions, BuiltModel
from quire_engine.model.divided import Links
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.shape import ModelShape
from quire_engine.runner.arithmetic import same_arithmetic
from quire_engine.runner.cpu_start import make_threads
from quire_engine.runner.kv_cache import allocate, allocate_swap_space, make_layout
from quire_engine.runner.memory import available_memory
from quire_engine.runner.model_runner import ComputedLogits, ModelRunner
from quire_engine.runner.parallel.links import RankLinks, connect_links
from quire_engine.runner.parallel.local_ranks import Sockets
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Frames,
    Loaded,
    MeasureMemory,
    Memory,
    Refused,
    Sample,
    Sampled,
    Step,
    ToRank,
)
from quire_engine.runner.parallel.stage_runner import StageRunner
from quire_engine.runner.parallel.streams import StreamLost
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.startup import ask_for_tiles, model_limit
from quire_engine.runner.threads import SharedFrom, use_threads

_log = logging.getLogger(__name__)


class _Rank:
    """A rank with its weights."""

    def __init__(self, config: EngineConfig, begin: Begin, links: Links) -> None:
        """Load the weights. Raise StartError or ConfigurationError if they cannot be served."""
        self._config = config
        ask_for_tiles()
        self._threads = use_threads(config.threads)
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.part)
        arithmetic = same_arithmetic(config, begin.dtype, begin.backend)
        self._dtype = arithmetic.dtype
        self._shape: ModelShape = candidate.shape
        with torch.inference_mode():
            self.built: BuiltModel = candidate.build(
                BuildOptions(
                    load_format=config.model.load_format,
                    seed=config.model.seed,
                    dtype=arithmetic.dtype,
                    backend=arithmetic.backend,
                    links=links,
                )
            )

    def allocate(self, message: Allocate, *, samples: bool) -> StageRunner | ModelRunner:
        """Return the runner of this rank, with its KV cache."""
        size = message.size
        layout = make_layout(self._shape, self._config.cache.block_size, size)
        caches = allocate(layout, self._shape, self._dtype)
        swap_space = allocate_swap_space(layout, caches)
        max_rows, deterministic = self._config.scheduler.max_num_seqs, self._config.device.deterministic
        threads = make_threads(
            self._threads, SharedFrom(asleep=message.shared_asleep, spinning=message.shared_spinning)
        )
        if samples:
            return ModelRunner(
                model=self.built.model,
                caches=caches,
                swap_space=swap_space,
                layout=layout,
                vocab_size=self._shape.vocab_size,
                max_rows=max_rows,
                max_model_len=size.max_model_len,
                threads=threads,
                deterministic=deterministic,
            )
        return StageRunner(
            model=self.built.model,
            caches=caches,
            swap_space=swap_space,
            layout=layout,
            max_rows=max_rows,
            max_model_len=size.max_model_len,
            threads=threads,
            deterministic=deterministic,
        )


def serve(config: EngineConfig, frames: Frames, rank: int, links: RankLinks) -> int:
    """Load, run batches until rank 0 closes the connection, and return the exit status."""
    decoder = msgspec.msgpack.Decoder(ToRank)
    frame = frames.receive()
    if frame is None:
        return 0
    begin = decoder.decode(frame)
    try:
        loaded = _Rank(config, begin, links.links)
    except (StartError, ConfigurationError) as error:
        frames.send(Refused(message=str(error), exit_code=error.exit_code))
        return 1
    frames.send(Loaded(weight_bytes=loaded.built.weight_bytes))
    samples = rank == topology_of(config.parallel).sampler
    runner: StageRunner | ModelRunner | None = None
    computed: ComputedLogits | None = None
    while (frame := frames.receive()) is not None:
        message: ToRank = decoder.decode(frame)
        match message:
            case MeasureMemory():
                available = available_memory()
                size = None if available is None else available.size
                frames.send(Memory(size=size, is_own=available is not None and available.is_own))
            case Allocate():
                runner = loaded.allocate(message, samples=samples)
                # Objects from loading stay alive, so the garbage collector need not visit them between steps.
                gc.collect()
                gc.freeze()
            case Step(batch):
                assert runner is not None, "a batch before the KV cache"
                links.reset_waited()
                computed = runner.execute(batch)
            case Sample(masks):
                assert computed is not None, "sampling before a batch"
                output = computed.sample(masks).wait()
                # The time for which this stage waited for the one before is not its own.
                own_seconds = max(0.0, output.run_seconds - links.waited_seconds)
                frames.send(Sampled(replace(output, run_seconds=own_seconds)))
    return 0


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
    set_up_logging(config.log.level, config.log.format, process=f"rank {arguments.rank}")
    frames = Frames(socket.socket(fileno=arguments.connection))
    try:
        links = connect_links(topology_of(config.parallel), arguments.rank, arguments.sockets)
        return serve(config, frames, arguments.rank, links)
    except (StreamLost, OSError) as error:
        _log.error("rank %d ends: %s", arguments.rank, error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
