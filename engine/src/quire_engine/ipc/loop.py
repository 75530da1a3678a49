"""The engine process: it receives requests, steps the engine, and sends the sampled tokens.

Started by ``ipc.supervision`` as ``python -m quire_engine.ipc.loop``. Only this process loads the model and torch. It
ends on a shutdown message, when the API process is gone, or when a step fails: after a failure within a step the state
of rows and blocks is unknown, so the process reports the error and the supervisor starts another one.
"""

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import BinaryIO, cast

from quire_common.errors import ConfigurationError
from quire_engine import logs
from quire_engine.config import EngineConfig
from quire_engine.core.ports import LoadedModel
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.errors import EngineError, StartError
from quire_engine.ipc.channel import Channel
from quire_engine.ipc.messages import (
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    Connected,
    Failed,
    LoadAdapter,
    Ping,
    Ready,
    Refused,
    ResetPrefixCache,
    RunnerFactory,
    SetVocabulary,
    Shutdown,
    StartUp,
    Stats,
    StepExpected,
    Submit,
    UnloadAdapter,
    hang_limit,
)

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 0.02


class EngineLoop:
    """The loop of the engine process: receive, step, send."""

    def __init__(
        self, engine: Engine, channel: Channel, *, hang_timeout_seconds: float, check_integrity: bool = False
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._hang_timeout_seconds = hang_timeout_seconds
        self._check_integrity = check_integrity
        self._announced_seconds = 0.0
        engine.on_scheduled = self._announce
        engine.on_prepared(channel.wake)
        self._stats_due = 0.0
        self._changed = True
        self._received_prompt_tokens = 0

    def run(self) -> None:
        """Run until a shutdown message."""
        while self._take_in():
            self._engine.add_prepared()
            self._report_adapters()
            self._report_failed()
            if self._engine.has_work:
                self._step()
            elif self._changed:
                self._send_stats()
                self._changed = False
            else:
                self._channel.wait()

    def _take_in(self) -> bool:
        """Handle all messages that have arrived; return False on a shutdown."""
        while (message := self._channel.receive()) is not None:
            self._changed = True
            match message:
                case Submit(request):
                    self._submit(request)
                case Cancel(keys):
                    for key in keys:
                        self._engine.cancel(key)
                case SetVocabulary(vocabulary):
                    self._engine.set_vocabulary(vocabulary)
                case LoadAdapter(adapter, folder):
                    self._engine.load_adapter(adapter, folder)
                case UnloadAdapter(adapter):
                    self._engine.unload_adapter(adapter)
                case ResetPrefixCache():
                    self._engine.forget_prefixes()
                case Ping():
                    pass  # Any message makes an idle loop send its stats.
                case Shutdown():
                    return False
        return True

    def _submit(self, request: Request) -> None:
        if request.parent is None:
            self._received_prompt_tokens += len(request.prompt_token_ids)
        refusal = self._engine.add(request)
        if refusal is not None:
            self._channel.send(Refused(request.key, refusal))

    def _report_adapters(self) -> None:
        for event in self._engine.take_adapter_events():
            self._changed = True
            if event.reason is None:
                self._channel.send(AdapterLoaded(event.adapter, event.rank, event.num_bytes))
            else:
                self._channel.send(AdapterFailed(event.adapter, event.reason, event.message))

    def _report_failed(self) -> None:
        for key, reason in self._engine.take_failed().items():
            self._channel.send(Refused(key, reason))

    def _step(self) -> None:
        self._changed = True
        output = self._engine.step()
        if output is not None:
            began = monotonic()
            if output.keys or output.first_scheduled_keys or output.prompt_logprobs or output.pooled:
                self._channel.send(output)
            if began >= self._stats_due:
                self._stats_due = self._send_stats() + STATS_INTERVAL_SECONDS
            self._engine.seconds.output += monotonic() - began
        if self._check_integrity:
            self._engine.check_integrity()

    def _announce(self, expected_seconds: float) -> None:
        """Announce a long step to the API process, so that it waits longer, or the end of long steps."""
        is_long = hang_limit(self._hang_timeout_seconds, expected_seconds) > self._hang_timeout_seconds
        seconds = expected_seconds if is_long else 0.0
        if seconds != self._announced_seconds:
            self._announced_seconds = seconds
            self._channel.send(StepExpected(seconds))

    def _send_stats(self) -> float:
        """Send a report, and return its time."""
        engine = self._engine
        stats = Stats(
            time=monotonic(),
            last_step_time=engine.last_step_time,
            gauges=engine.gauges(),
            counters=engine.counters,
            seconds=engine.seconds,
            received_prompt_tokens=self._received_prompt_tokens,
        )
        self._channel.send(stats)
        return stats.time


def _end_with_parent(parent_pipe: BinaryIO) -> None:
    """End this process when the API process ends, however it ends and whatever this process is doing."""

    def watch() -> None:
        while parent_pipe.read(1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-death watcher", daemon=True).start()
    if sys.platform == "linux":
        # The thread cannot run while the process is stopped; the kernel can kill it even then.
        parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL)


def _load(factory: RunnerFactory, config: EngineConfig) -> LoadedModel:
    module, _, name = factory.function.partition(":")
    function = cast("Callable[..., LoadedModel]", getattr(importlib.import_module(module), name))
    return function(config, **factory.options)


def serve(wanted: StartUp) -> int:
    """Load the model, report it, step until the shutdown, and return the exit status."""
    channel = Channel(wanted.address)
    channel.send(Connected())
    doing = "loading the model"
    process_seconds = monotonic() - wanted.began
    try:
        if wanted.config.parallel.node_rank:
            doing = "running the ranks of this node"
            # It imports torch, which other engines import with the model.
            from quire_engine.ipc.node_loop import serve_node

            serve_node(wanted.config, channel)
            return 0
        model = _load(wanted.factory, wanted.config)
        config = wanted.config
        engine = make_engine(model, scheduler=config.scheduler, speculation=config.speculation)
        phases = {"process": process_seconds, **model.phase_seconds}
        channel.send(_ready(model, phases, max_num_seqs=wanted.config.scheduler.max_num_seqs))
        # Objects from loading stay alive, so the garbage collector need not visit them between steps.
        gc.collect()
        gc.freeze()
        doing = "running a step"
        EngineLoop(
            engine,
            channel,
            hang_timeout_seconds=wanted.config.engine_process.hang_timeout_seconds,
            check_integrity=wanted.config.scheduler.check_integrity,
        ).run()
        engine.close()
        return 0
    except (StartError, ConfigurationError) as error:
        channel.send(Failed(str(error), error.exit_code))
    except EngineError as error:
        channel.send(Failed(str(error), 1))
    except Exception as error:
        logger.exception("the engine process failed while %s", doing)
        channel.send(Failed(f"the engine process failed while {doing}: {type(error).__name__}: {error}"))
    finally:
        channel.close()
    return 1


def _ready(model: LoadedModel, phase_seconds: dict[str, float], *, max_num_seqs: int) -> Ready:
    return Ready(
        pid=os.getpid(),
        model_bytes=model.model_bytes,
        kv_cache_bytes=model.kv_cache_bytes,
        num_blocks=sum(group.num_blocks for group in model.layout.groups),
        block_size=model.layout.block_size,
        max_model_len=model.traits.max_model_len,
        dtype=model.dtype,
        weights=model.weights,
        phase_seconds=phase_seconds,
        eos_token_ids=model.traits.eos_token_ids,
        max_num_seqs=max_num_seqs,
    )


def main() -> int:
    # Ctrl-C and a stop of the whole group reach this process too; the API process drains first and then ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Unbuffered, because the watcher thread's read must not hold a lock when the process ends.
    parent_pipe = os.fdopen(0, "rb", buffering=0, closefd=False)
    line = parent_pipe.readline()
    if not line.strip():
        print("this is the engine process of quire-engine, which starts it itself; run quire-engine", file=sys.stderr)
        return 2
    wanted = StartUp.decode(line)
    _end_with_parent(cast("BinaryIO", parent_pipe))
    logs.set_up_engine(wanted.config.log)
    if wanted.config.parallel.ranks > 1:
        multiprocessing.current_process().name = "rank 0"  # Ranks that wait for its compilation log this name.
    return serve(wanted)


if __name__ == "__main__":
    sys.exit(main())
