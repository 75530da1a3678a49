"""A rank other than 0 on a GPU: its part of the model, and the batches that it runs.

With one stage it samples as rank 0 does. With several, the first rank of the last stage samples and sends the tokens.
"""

import contextlib
import gc
import socket
import threading
from collections import deque
from dataclasses import replace
from queue import SimpleQueue

import msgspec
import torch

from quire_engine.config import EngineConfig
from quire_engine.core.ports import ForwardPass, PendingOutput
from quire_engine.errors import EngineError, EngineStartError
from quire_engine.model.divided import Links
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner.adapter_start import StartedAdapters
from quire_engine.runner.arithmetic import dtype_of, untimed_backend
from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.device.faults import device_faults
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device_runner import DeviceRunner
from quire_engine.runner.device_stage import DeviceStage
from quire_engine.runner.device_start import make_rank_runner, measure_device
from quire_engine.runner.kv_cache import make_layout
from quire_engine.runner.parallel.device_group import DeviceRanks
from quire_engine.runner.parallel.messages import (
    Allocate,
    Begin,
    Connect,
    Frames,
    MeasureDevice,
    MeasuredMemory,
    Sample,
    Sampled,
    StepMessage,
    ToRank,
)
from quire_engine.runner.parallel.topology import topology_of
from quire_engine.runner.profiling import device_memory
from quire_engine.runner.startup import FULL_OF_WEIGHTS, build_options, in_memory, model_limit
from quire_engine.runner.threads import use_threads
from quire_kernels.kv_cache import FP8

_MOST_IN_FLIGHT = 2
"""With one stage, rank 0 has as many steps in flight at most, and the buffers of a runner are for as many."""


class DeviceRank:
    """A rank with its weights."""

    def __init__(
        self,
        config: EngineConfig,
        begin: Begin,
        links: Links,
        devices: DeviceRanks,
        device: torch.device,
        *,
        rank: int,
    ) -> None:
        """Load the weights. Raise StartError or ConfigurationError if they cannot be served."""
        use_threads(config.threads)
        if device.type == "cuda":
            # Our kernels are launched on the current device.
            torch.cuda.set_device(device)
        self._config, self._rank = config, rank
        self._devices = devices
        self._device = device
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

    def run(self, frames: Frames) -> None:
        """Run batches until rank 0 closes the connection. Raise StartError if the GPU fails."""
        decoder = msgspec.msgpack.Decoder(ToRank)
        runner: DeviceRunner | DeviceStage | None = None
        forward: ForwardPass | None = None
        stages = self._config.parallel.pipeline
        pending: deque[PendingOutput] = deque()
        sender: _Sender | None = None
        if stages > 1 and self._rank == topology_of(self._config.parallel).sampler:
            sender = _Sender(frames, self._device)
        while (frame := frames.receive()) is not None:
            message: ToRank = decoder.decode(frame)
            match message:
                case Connect():
                    self._connect()
                case MeasureDevice():
                    assert self._memory is not None, "Triton's interpreter has no GPU to measure"
                    use = measure_device(self._config, self._model, GraphSizes(), self._memory, rank=self._rank)
                    frames.send(MeasuredMemory(use))
                case Allocate():
                    runner = self._allocate(message)
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
                        sender.add(sampled, None if self._devices.before is None else self._devices.before.wait)
        if sender is not None:
            sender.close()
        if runner is not None:
            runner.close()
        self._devices.close()

    def _connect(self) -> None:
        try:
            self._devices.connect(self._config.parallel.join_timeout_seconds)
        except RuntimeError as error:
            raise EngineStartError(f"the ranks cannot connect their GPUs: {error}") from error

    def _allocate(self, message: Allocate) -> DeviceRunner | DeviceStage:
        layout = make_layout(self._model.cached_shape, self._config.cache.block_size, message.size)
        return make_rank_runner(
            self._config, self._model, layout, message.size.max_model_len, GraphSizes(), rank=self._rank
        )


class _Sender:
    """A thread that waits for the tokens of each step and sends them to rank 0, while further steps are issued."""

    def __init__(self, frames: Frames, device: torch.device) -> None:
        self._frames, self._device = frames, device
        self._steps: SimpleQueue[tuple[PendingOutput, tuple[Mark, Mark] | None] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sends tokens", daemon=True)
        self._thread.start()

    def add(self, pending: PendingOutput, wait: tuple[Mark, Mark] | None) -> None:
        """Send the tokens of a step; ``wait`` are the marks around its wait for the stage before."""
        self._steps.put((pending, wait))

    def close(self) -> None:
        """Wait for the steps that were added. Raise the fault of the GPU that ended the thread."""
        self._steps.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @torch.inference_mode()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (step := self._steps.get()) is not None:
            pending, wait = step
            try:
                output = pending.wait()
                # The time for which this stage waited for the one before is not its own.
                waited = 0.0 if wait is None else wait[1].seconds_since(wait[0])
                self._frames.send(Sampled(replace(output, run_seconds=max(0.0, output.run_seconds - waited))))
            except (EngineError, RuntimeError, OSError) as error:
                if not isinstance(error, OSError):
                    self._failure = error
                # This ends the loop that receives batches, and shows rank 0 that this rank is gone.
                with contextlib.suppress(OSError):
                    self._frames.stream.shutdown(socket.SHUT_RDWR)
                return
