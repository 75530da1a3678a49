"""The weights of a rank on a GPU, and the runner of its part of the model. It needs Triton."""

import torch

from quire_engine.config import EngineConfig
from quire_engine.model.divided import Links
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner.accelerator import make_accelerator
from quire_engine.runner.adapter_start import StartedAdapters
from quire_engine.runner.arithmetic import dtype_of, untimed_backend
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.faults import device_faults
from quire_engine.runner.kv_cache import make_layout
from quire_engine.runner.parallel.messages import Allocate, Begin, Measured
from quire_engine.runner.profiling import device_memory
from quire_engine.runner.start_runner import RankRunner, make_rank_runner, measure_device
from quire_engine.runner.startup import FULL_OF_WEIGHTS, build_options, in_memory, model_limit
from quire_engine.runner.threads import use_threads
from quire_kernels.kv_cache import FP8


class DeviceRank:
    """A rank with its weights; see ``rank.LoadedRank``."""

    def __init__(self, config: EngineConfig, begin: Begin, links: Links, device: torch.device, *, rank: int) -> None:
        use_threads(config.threads)
        if device.type == "cuda":
            # Our kernels are launched on the current device.
            torch.cuda.set_device(device)
        self._config, self._rank = config, rank
        self._memory = device_memory(device) if device.type == "cuda" else None
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.part)
        dtype = dtype_of(begin.dtype)
        options = build_options(config, device, dtype, untimed_backend(config, dtype, device.type), links)
        with torch.inference_mode(), device_faults(f"reading the weights onto {device}", when_full=FULL_OF_WEIGHTS):
            built = candidate.build(options)
        cache_dtype = FP8 if config.cache.kv_cache_dtype == "fp8" else dtype
        self._model = in_memory(config, candidate, device, dtype, cache_dtype, StartedAdapters(built=built), None)

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def measure(self) -> Measured:
        assert self._memory is not None, "Triton's interpreter has no GPU to measure"
        return Measured(use=measure_device(self._config, self._model, GraphSizes(), self._memory, rank=self._rank))

    def allocate(self, message: Allocate) -> RankRunner:
        layout = make_layout(self._model.cached_shape, self._config.cache.block_size, message.size)
        accelerator = make_accelerator(self._model.device)
        return make_rank_runner(
            self._config, self._model, layout, message.size.max_model_len, accelerator, rank=self._rank
        )
