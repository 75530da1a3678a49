"""The engine's command line and termination, as ``desired`` (pods) and ``quire up`` (local processes) use them."""

from collections.abc import Sequence

from quire_common.contract.engine import GROUP_PORT, HTTP_PORT
from quire_operator.api import AdapterSlots, Draft, Engine, KVCache, Parallelism, Spec, Speculation
from quire_operator.api.schema import declared

_SIGKILL_MARGIN_SECONDS = 10.0
_WORKER_INDEX, _LEADER_ADDRESS = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"
"""Variables that LeaderWorkerSets set in containers; Kubernetes replaces these references to them."""


def kill_grace_seconds(spec: Spec) -> float:
    """Return the time from SIGTERM to SIGKILL: the drain and a margin for the exit."""
    return spec.drain.timeout_seconds + _SIGKILL_MARGIN_SECONDS


def engine_args(
    spec: Spec,
    *,
    model_path: str,
    draft_path: str | None = None,
    host: str = "0.0.0.0",
    port: int = HTTP_PORT,
    kv_cache_bytes: int | None = None,
    threads: int | None = None,
    api_key_file: str | None = None,
    served_names: Sequence[str] = (),
    adapters_file: str | None = None,
    join_seconds: int | None = None,
) -> list[str]:
    """Return the engine's arguments for one replica, without the command itself.

    ``served_names`` are the model names that it accepts; by default the one of the spec. ``kv_cache_bytes``, which is
    for all ranks, overrides ``kvCache`` if several replicas share a machine. Without ``draft_path``, an optional draft
    model is left out. ``adapters_file`` lists the adapters, if ``engine.adapters`` is set. ``join_seconds`` is how long
    pods of a group wait for each other; without it all ranks run on one machine. ``extraArgs`` come last.
    """
    engine = spec.engine
    args = ["--model", model_path, "--served-model-name", *(served_names or (spec.model.served_name,))]
    args += ["--host", host, "--port", str(port)]
    for field in declared(Engine):
        value = getattr(engine, field.attribute)
        if isinstance(value, KVCache):
            args += _memory_args(spec, value.size_bytes if kv_cache_bytes is None else kv_cache_bytes)
        elif field.attribute == "swap_space_bytes":
            args += field.kind.arguments(_of_one_rank(spec, value))
        elif isinstance(value, AdapterSlots):
            args += _adapter_args(value, adapters_file)
        elif isinstance(value, Speculation):
            args += _speculation_args(value, draft_path)
        else:
            args += field.kind.arguments(value)
    args += _parallel_args(spec.parallelism)
    if join_seconds is not None:
        args += _group_args(spec.parallelism, join_seconds)
    args += ["--drain-timeout", f"{spec.drain.timeout_seconds:g}"]
    if threads is not None:
        args += ["--threads", str(threads)]
    if api_key_file is not None:
        args += ["--api-key-file", api_key_file]
    return [*args, *engine.extra_args]


def _speculation_args(speculation: Speculation, draft_path: str | None) -> list[str]:
    if speculation.draft is not None and draft_path is None:
        return []
    args: list[str] = []
    for field in declared(Speculation):
        value = getattr(speculation, field.attribute)
        if not isinstance(value, Draft):
            args += field.kind.arguments(value)
        elif draft_path is not None:
            args += ["--spec-model", draft_path]
    return args


def _parallel_args(shape: Parallelism) -> list[str]:
    """Return sizes above 1, so that a replica of one rank has the same pod template as without the field."""
    fields = [field for field in declared(Parallelism) if field.attribute != "nodes"]
    sizes = [(field.kind, getattr(shape, field.attribute)) for field in fields]
    return [argument for kind, size in sizes if size > 1 for argument in kind.arguments(size)]


def _group_args(shape: Parallelism, join_seconds: int) -> list[str]:
    """Return the arguments of each pod of a group, which are equal for all: their values differ by variables."""
    place = ["--nnodes", str(shape.nodes), "--node-rank", _WORKER_INDEX]
    leader = ["--master-addr", _LEADER_ADDRESS, "--master-port", str(GROUP_PORT)]
    return [*place, *leader, "--distributed-timeout-seconds", str(join_seconds)]


def _of_one_rank(spec: Spec, size_bytes: int) -> int:
    """Return the share of one rank, to which the engine's flags for sizes refer, as those of vLLM."""
    return size_bytes // spec.parallelism.ranks


def _adapter_args(slots: AdapterSlots, adapters_file: str | None) -> list[str]:
    args = ["--enable-lora"]
    for field in declared(AdapterSlots):
        args += field.kind.arguments(getattr(slots, field.attribute))
    return args if adapters_file is None else [*args, "--adapters-file", adapters_file]


def _memory_args(spec: Spec, kv_cache_bytes: int | None) -> list[str]:
    if kv_cache_bytes is None:
        args = ["--gpu-memory-utilization", f"{spec.engine.kv_cache.memory_percent / 100:g}"]
    else:
        args = ["--kv-cache-memory-bytes", str(_of_one_rank(spec, kv_cache_bytes))]
    # Without this flag, an engine that cannot use its GPU would serve slowly from the CPU of an expensive node.
    return [*args, "--device", "rocm" if spec.resources.on_amd else "cuda"] if spec.resources.gpus else args
