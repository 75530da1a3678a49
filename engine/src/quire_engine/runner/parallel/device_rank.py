"""A rank other than 0 on a GPU: its part of the model, and the batches that it runs and samples as rank 0 does."""

import gc
from collections import deque

import msgspec
import torch

from quire_engine.config import EngineConfig
from quire_engine.core.ports import ForwardPass, PendingOutput
from quire_engine.errors import EngineStartError
from quire_engine.model.candidate import BuildOptions
from quire_engine.model.divided import Links
from quire_engine.model.linear import choose_linear_backend
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner.adapter_start import StartedAdapters
from quire_engine.runner.arithmetic import dtype_of
from quire_engine.runner.device.faults import device_faults
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device_runner import DeviceRunner
from quire_engine.runner.device_start import make_device_runner, measure_device
from quire_engine.runner.kv_cache import make_layout
from quire_engine.runner.parallel.device_group import DeviceGroup
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Connect,
    Frames,
    Measured,
    MeasureDevice,
    Sample,
    Step,
    ToRank,
)
from quire_engine.runner.profiling import device_memory
from quire_engine.runner.startup import FULL_OF_WEIGHTS, in_memory, model_limit
from quire_engine.runner.threads import use_threads
from quire_kernels.kv_cache import FP8

_MOST_IN_FLIGHT = 2
"""Rank 0 has as many steps in flight at most, and the buffers of a runner are for as many."""


class DeviceRank:
    """A rank with its weights."""

    def __init__(
        self, config: EngineConfig, begin: Begin, links: Links, group: DeviceGroup, device: torch.device
    ) -> None:
        """Load the weights. Raise StartError or ConfigurationError if they cannot be served."""
        use_threads(config.threads)
        if device.type == "cuda":
            # Our kernels are launched on the current device.
            torch.cuda.set_device(device)
        self._config = config
        self._group = group
        self._memory = device_memory(device) if device.type == "cuda" else None
        found = find_native_candidate(config.model.path, config.model.overrides)
        candidate = found.limited_to(model_limit(config, found.shape)).divided(links.part)
        dtype = dtype_of(begin.dtype)
        options = BuildOptions(
            load_format=config.model.load_format,
            seed=config.model.seed,
            dtype=dtype,
            backend=choose_linear_backend(
                dtype,
                device.type,
                deterministic=config.device.deterministic,
                quantization=config.model.quantization,
            ),
            device=device,
            links=links,
        )
        with torch.inference_mode(), device_faults(f"reading the weights onto {device}", when_full=FULL_OF_WEIGHTS):
            built = candidate.build(options)
        cache_dtype = FP8 if config.cache.kv_cache_dtype == "fp8" else dtype
        self._model = in_memory(config, candidate, device, dtype, cache_dtype, StartedAdapters(built=built), None)

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def run(self, frames: Frames) -> None:
        """Run batches until rank 0 closes the connection. Raise StartError if the GPU fails."""
        decoder = msgspec.msgpack.Decoder(ToRank)
        runner: DeviceRunner | None = None
        forward: ForwardPass | None = None
        pending: deque[PendingOutput] = deque()
        while (frame := frames.receive()) is not None:
            message: ToRank = decoder.decode(frame)
            match message:
                case Connect():
                    self._connect()
                case MeasureDevice():
                    assert self._memory is not None, "Triton's interpreter has no GPU to measure"
                    frames.send(Measured(measure_device(self._config, self._model, GraphSizes(), self._memory)))
                case Allocate():
                    runner = self._allocate(message)
                    # Objects from loading stay alive, so the garbage collector need not visit them between steps.
                    gc.collect()
                    gc.freeze()
                case Step(batch):
                    assert runner is not None, "a batch before the KV cache"
                    # A fault of the GPU is raised here.
                    while len(pending) >= _MOST_IN_FLIGHT:
                        pending.popleft().wait()
                    forward = runner.execute(batch)
                case Sample(masks):
                    assert forward is not None, "sampling before a batch"
                    pending.append(forward.sample(masks))
        if runner is not None:
            runner.close()
        self._group.close()

    def _connect(self) -> None:
        try:
            self._group.connect(self._config.parallel.join_timeout_seconds)
        except RuntimeError as error:
            raise EngineStartError(f"the ranks cannot connect their GPUs: {error}") from error

    def _allocate(self, message: Allocate) -> DeviceRunner:
        layout = make_layout(self._model.cached_shape, self._config.cache.block_size, message.size)
        return make_device_runner(self._config, self._model, layout, message.size.max_model_len, GraphSizes())
