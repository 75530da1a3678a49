"""The engine's command line and termination, as ``desired`` (pods) and ``quire up`` (local processes) use them.

Constants are ``quire_common.contract.engine``; tests/contract compares the arguments with the engine's own parser.
"""

from collections.abc import Sequence

from quire_common.contract.engine import HTTP_PORT
from quire_operator.domain.resource import KVCacheShare, KVCacheSize, PrefixCaching, Spec

_SIGKILL_MARGIN_SECONDS = 10.0


def kill_grace_seconds(spec: Spec) -> float:
    """Return the time from SIGTERM to SIGKILL: the drain and a margin for the exit."""
    return spec.drain.timeout_seconds + _SIGKILL_MARGIN_SECONDS


def engine_args(
    spec: Spec,
    *,
    model_path: str,
    host: str = "0.0.0.0",
    port: int = HTTP_PORT,
    kv_cache_bytes: int | None = None,
    threads: int | None = None,
    api_key_file: str | None = None,
    served_names: Sequence[str] = (),
) -> list[str]:
    """Return the engine's arguments for one replica, without the command itself.

    ``served_names`` are the model names that it accepts; by default the one of the spec. ``kv_cache_bytes`` overrides
    ``kvCache`` if several replicas share a machine. ``extraArgs`` come last.
    """
    engine = spec.engine
    args = ["--model", model_path, "--served-model-name", *(served_names or (spec.model.served_name,))]
    args += ["--host", host, "--port", str(port)]
    args += ["--dtype", engine.dtype.lower(), "--block-size", str(engine.block_size)]
    args += ["--max-num-seqs", str(engine.max_sequences), "--max-num-batched-tokens", str(engine.max_batched_tokens)]
    if engine.max_model_length is not None:
        args += ["--max-model-len", str(engine.max_model_length)]
    match engine.kv_cache:
        case _ if kv_cache_bytes is not None:
            args += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
        case KVCacheSize(size_bytes=size):
            args += ["--kv-cache-memory-bytes", str(size)]
        case KVCacheShare(memory_percent=percent):
            args += ["--gpu-memory-utilization", f"{percent / 100:g}"]
    if spec.resources.gpus:
        # Without this flag, an engine that cannot use its GPU would serve slowly from the CPU of an expensive node.
        args += ["--device", "cuda"]
    if engine.prefix_caching is PrefixCaching.DISABLED:
        args += ["--no-enable-prefix-caching"]
    args += ["--scheduling-policy", engine.scheduling_policy.lower(), "--preemption-mode", engine.preemption.lower()]
    if engine.swap_space_bytes:
        args += ["--swap-space-bytes", str(engine.swap_space_bytes)]
    args += ["--drain-timeout", f"{spec.drain.timeout_seconds:g}"]
    if threads is not None:
        args += ["--threads", str(threads)]
    if api_key_file is not None:
        args += ["--api-key-file", api_key_file]
    return [*args, *engine.extra_args]
