"""The process of a rank other than 0: it loads its part of the model and runs the batches that rank 0 sends.

Started by ``runner.parallel.group`` as ``python -m quire_engine.runner.parallel.rank``. It samples nothing: the tokens
that rank 0 samples are in the next batch. It ends when rank 0 closes the socket or ends, whatever it is doing.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys

import msgspec
import torch

from quire_common.errors import ConfigurationError
from quire_common.logs import set_up_logging
from quire_engine import config_json
from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.errors import StartError
from quire_engine.model.candidate import BuildOptions, BuiltModel
from quire_engine.model.divided import Links
from quire_engine.model.family import CausalLM
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.model_part import ModelPart
from quire_engine.model.shape import ModelShape
from quire_engine.runner.arithmetic import same_arithmetic
from quire_engine.runner.cpu_start import make_threads
from quire_engine.runner.inputs import RowState, build, table_blocks
from quire_engine.runner.kv_cache import allocate, allocate_swap_space
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.parallel.messages import Allocate, Begin, Frames, Loaded, Refused, Step, ToRank
from quire_engine.runner.parallel.shared_memory import SharedMemoryGroup
from quire_engine.runner.startup import ask_for_tiles, model_limit
from quire_engine.runner.swap import Swapper
from quire_engine.runner.threads import SharedFrom, ThreadChooser, use_threads
from quire_kernels.kv_cache import KVCache

_log = logging.getLogger(__name__)


class RankRunner:
    """The part of ``ModelRunner`` that a rank without sampling needs."""

    def __init__(
        self,
        *,
        model: CausalLM,
        caches: tuple[KVCache, ...],
        swap_space: tuple[KVCache, ...],
        layout: KVCacheLayout,
        max_rows: int,
        max_model_len: int,
        threads: ThreadChooser,
        deterministic: bool,
    ) -> None:
        self._model = model
        self._caches = caches
        self._swapper = Swapper(layout, caches, swap_space)
        self._layout = layout
        self._threads = threads
        self._deterministic = deterministic
        max_blocks = table_blocks(layout, max_model_len)
        self._rows = RowState(max_rows=max_rows, max_blocks=max_blocks, groups=len(layout.groups))

    @torch.inference_mode()
    def execute(self, batch: Batch) -> None:
        self._swapper.apply(batch)
        self._rows.apply(batch)
        self._threads.prepare(batch.num_tokens)
        rows = logits_rows(batch).rows
        inputs = build(batch, self._rows, self._layout, rows, deterministic=self._deterministic)
        self._model(inputs, self._caches)


class _Rank:
    """A rank with its weights."""

    def __init__(self, begin: Begin, links: Links) -> None:
        """Load the weights. Raise StartError or ConfigurationError if they cannot be served."""
        self._config = config = begin.config
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

    def allocate(self, message: Allocate) -> RankRunner:
        layout = message.layout
        caches = allocate(layout, self._shape, self._dtype)
        shared_from = SharedFrom(asleep=message.shared_asleep, spinning=message.shared_spinning)
        return RankRunner(
            model=self.built.model,
            caches=caches,
            swap_space=allocate_swap_space(layout, caches),
            layout=layout,
            max_rows=self._config.scheduler.max_num_seqs,
            max_model_len=message.max_model_len,
            threads=make_threads(self._threads, shared_from),
            deterministic=self._config.device.deterministic,
        )


def serve(frames: Frames, links: Links) -> int:
    """Load, run batches until rank 0 closes the socket, and return the exit status."""
    line = frames.receive()
    if line is None:
        return 0
    begin = config_json.decode(line, Begin)
    set_up_logging(begin.config.log.level, begin.config.log.format, process=f"rank {links.part.tensor_rank}")
    encoder = msgspec.msgpack.Encoder()
    try:
        rank = _Rank(begin, links)
    except (StartError, ConfigurationError) as error:
        frames.send(encoder.encode(Refused(message=str(error), exit_code=error.exit_code)))
        return 1
    frames.send(encoder.encode(Loaded(weight_bytes=rank.built.weight_bytes)))
    decoder = msgspec.msgpack.Decoder(ToRank)
    runner: RankRunner | None = None
    while (frame := frames.receive()) is not None:
        message: Allocate | Step = decoder.decode(frame)
        if isinstance(message, Allocate):
            runner = rank.allocate(message)
            # Objects from loading stay alive, so the garbage collector need not visit them between steps.
            gc.collect()
            gc.freeze()
        else:
            assert runner is not None, "a batch before the KV cache"
            runner.execute(message.batch)
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
    if len(sys.argv) != 6:
        print("this is a rank of quire-engine, which starts it itself; run quire-engine", file=sys.stderr)
        return 2
    rank, ranks, stream, memory, parent = map(int, sys.argv[1:])
    _end_with(parent)
    frames = Frames(socket.socket(fileno=stream))
    tensor = SharedMemoryGroup(memory, rank=rank, ranks=ranks)
    os.close(memory)
    return serve(frames, Links(part=ModelPart(tensor_rank=rank, tensor_size=ranks), tensor=tensor))


if __name__ == "__main__":
    sys.exit(main())
