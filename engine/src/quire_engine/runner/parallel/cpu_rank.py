"""A rank other than 0 on a CPU: its part of the model, and the batches that it runs."""

import gc
from dataclasses import replace

import msgspec
import torch

from quire_engine.config import EngineConfig
from quire_engine.model.candidate import BuiltModel
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.shape import ModelShape
from quire_engine.runner.arithmetic import same_arithmetic
from quire_engine.runner.cpu_runner import CpuParts, StageRunner
from quire_engine.runner.cpu_start import make_threads
from quire_engine.runner.kv_cache import CPU, allocate, make_layout
from quire_engine.runner.memory import available_memory
from quire_engine.runner.model_runner import ComputedLogits, ModelRunner
from quire_engine.runner.parallel.links import RankLinks
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Frames,
    MeasureMemory,
    Memory,
    Sample,
    Sampled,
    StepMessage,
    ToRank,
)
from quire_engine.runner.startup import ask_for_tiles, build_options, model_limit
from quire_engine.runner.threads import SharedFrom, use_threads


class CpuRank:
    """A rank with its weights."""

    def __init__(self, config: EngineConfig, begin: Begin, links: RankLinks, *, samples: bool) -> None:
        """Load the weights. Raise StartError or ConfigurationError if they cannot be served."""
        self._config = config
        self._links = links
        self._samples = samples
        ask_for_tiles()
        self._threads = use_threads(config.threads)
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.links.part)
        arithmetic = same_arithmetic(config, begin.dtype, begin.backend)
        self._dtype = arithmetic.dtype
        self._shape: ModelShape = candidate.shape
        with torch.inference_mode():
            self._built: BuiltModel = candidate.build(
                build_options(config, CPU, arithmetic.dtype, arithmetic.backend, links.links)
            )

    @property
    def weight_bytes(self) -> int:
        return self._built.weight_bytes

    def _allocate(self, message: Allocate) -> StageRunner | ModelRunner:
        """Return the runner of this rank, with its KV cache."""
        size = message.size
        layout = make_layout(self._shape, self._config.cache.block_size, size)
        caches = allocate(layout, self._shape, self._dtype)
        shared_from = SharedFrom(asleep=message.shared_asleep, spinning=message.shared_spinning)
        parts = CpuParts(
            model=self._built.model,
            caches=caches,
            layout=layout,
            max_rows=self._config.scheduler.max_num_seqs,
            max_model_len=size.max_model_len,
            threads=make_threads(self._threads, shared_from),
            deterministic=self._config.device.deterministic,
        )
        return ModelRunner(parts, vocab_size=self._shape.vocab_size) if self._samples else StageRunner(parts)

    def run(self, frames: Frames) -> None:
        """Run batches until rank 0 closes the connection."""
        decoder = msgspec.msgpack.Decoder(ToRank)
        runner: StageRunner | ModelRunner | None = None
        computed: ComputedLogits | None = None
        while (frame := frames.receive()) is not None:
            message: ToRank = decoder.decode(frame)
            match message:
                case MeasureMemory():
                    frames.send(Memory(available_memory()))
                case Allocate():
                    runner = self._allocate(message)
                    # Objects from loading stay alive, so the garbage collector need not visit them between steps.
                    gc.collect()
                    gc.freeze()
                case StepMessage(batch):
                    assert runner is not None, "a batch before the KV cache"
                    self._links.reset_waited()
                    computed = runner.execute(batch)
                case Sample(masks):
                    assert computed is not None, "sampling before a batch"
                    output = computed.sample(masks).wait()
                    # The time for which this stage waited for the one before is not its own.
                    own_seconds = max(0.0, output.run_seconds - self._links.waited_seconds)
                    frames.send(Sampled(replace(output, run_seconds=own_seconds)))
