"""The weights of a rank on a CPU, and the runner of its part of the model. It needs numba."""

import torch

from quire_engine.config import EngineConfig
from quire_engine.model.divided import Links
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner.adapter_start import StartedAdapters
from quire_engine.runner.arithmetic import same_arithmetic
from quire_engine.runner.kv_cache import CPU, make_layout
from quire_engine.runner.memory import available_memory
from quire_engine.runner.parallel.messages import Allocate, Begin, Measured
from quire_engine.runner.start_runner import RankRunner, cpu_accelerator, make_rank_runner
from quire_engine.runner.startup import ask_for_tiles, build_options, in_memory, model_limit
from quire_engine.runner.threads import SharedFrom, use_threads


class CpuRank:
    """A rank with its weights; see ``rank.LoadedRank``."""

    def __init__(self, config: EngineConfig, begin: Begin, links: Links, *, rank: int) -> None:
        self._config, self._rank = config, rank
        ask_for_tiles()
        self._threads = use_threads(config.threads)
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.part)
        arithmetic = same_arithmetic(config, begin.dtype, begin.backend)
        dtype = arithmetic.dtype
        with torch.inference_mode():
            built = candidate.build(build_options(config, CPU, dtype, arithmetic.backend, links))
        self._model = in_memory(config, candidate, CPU, dtype, dtype, StartedAdapters(built=built), None)

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def measure(self) -> Measured:
        return Measured(available=available_memory())

    def allocate(self, message: Allocate) -> RankRunner:
        size = message.size
        layout = make_layout(self._model.cached_shape, self._config.cache.block_size, size)
        shared_from = SharedFrom(asleep=message.shared_asleep, spinning=message.shared_spinning)
        accelerator = cpu_accelerator(self._threads, shared_from)
        return make_rank_runner(self._config, self._model, layout, size.max_model_len, accelerator, rank=self._rank)
