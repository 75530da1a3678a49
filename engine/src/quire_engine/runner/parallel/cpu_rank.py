"""The weights of a rank on a CPU, and the runner of its part of the model. It needs numba."""

import torch

from quire_engine.config import EngineConfig
from quire_engine.model.candidate import BuiltModel
from quire_engine.model.divided import Links
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.shape import ModelShape
from quire_engine.runner.arithmetic import same_arithmetic
from quire_engine.runner.cpu_runner import CpuParts, StageRunner
from quire_engine.runner.cpu_start import make_threads
from quire_engine.runner.kv_cache import CPU, allocate, make_layout
from quire_engine.runner.memory import available_memory
from quire_engine.runner.model_runner import ModelRunner
from quire_engine.runner.parallel.messages import Allocate, Begin, Measured
from quire_engine.runner.startup import ask_for_tiles, build_options, model_limit
from quire_engine.runner.threads import SharedFrom, use_threads


class CpuRank:
    """A rank with its weights; see ``rank.LoadedRank``."""

    def __init__(self, config: EngineConfig, begin: Begin, links: Links, *, samples: bool) -> None:
        self._config = config
        self._samples = samples
        ask_for_tiles()
        self._threads = use_threads(config.threads)
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.part)
        arithmetic = same_arithmetic(config, begin.dtype, begin.backend)
        self._dtype = arithmetic.dtype
        self._shape: ModelShape = candidate.shape
        with torch.inference_mode():
            self._built: BuiltModel = candidate.build(
                build_options(config, CPU, arithmetic.dtype, arithmetic.backend, links)
            )

    @property
    def weight_bytes(self) -> int:
        return self._built.weight_bytes

    def measure(self) -> Measured:
        return Measured(available=available_memory())

    def allocate(self, message: Allocate) -> StageRunner | ModelRunner:
        size = message.size
        layout = make_layout(self._shape, self._config.cache.block_size, size)
        shared_from = SharedFrom(asleep=message.shared_asleep, spinning=message.shared_spinning)
        parts = CpuParts(
            model=self._built.model,
            caches=allocate(layout, self._shape, self._dtype),
            layout=layout,
            max_rows=self._config.scheduler.max_num_seqs,
            max_model_len=size.max_model_len,
            threads=make_threads(self._threads, shared_from),
            deterministic=self._config.device.deterministic,
        )
        return ModelRunner(parts, vocab_size=self._shape.vocab_size) if self._samples else StageRunner(parts)
