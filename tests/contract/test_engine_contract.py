"""What the operator asks of the engine is what the engine offers: flags, their values, the KV cache's arithmetic."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine import flag_table, flags
from quire_engine.config import EngineConfig
from quire_engine.core.kv_layout import kv_bytes_per_token
from quire_engine.errors import FlagsError
from quire_operator.adapters.local_machine import this_machine
from quire_operator.domain import capacity, engine_contract, engine_flags
from quire_operator.domain.spec import DType, Spec
from quire_operator.domain.spec.engine import BLOCK_SIZES


def spec_of(engine: dict[str, object], **spec: object) -> Spec:
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": "hf://a/b", "servedName": "org/Chat"}, "engine": engine, **spec},
    }
    parsed = Spec.parse(body)
    assert isinstance(parsed, Spec), str(parsed)
    return parsed


def engine_reads(args: list[str]) -> EngineConfig:
    return flags.parse(args, {})


def test_the_committed_flags_are_the_engines() -> None:
    assert json.loads(json.dumps(flag_table.schema()))["properties"] == engine_flags.flag_schema(), "make engine-flags"


def test_every_flag_that_quire_sets_exists() -> None:
    known = {*flag_table.FLAGS, "help", "version", "flag-schema"}
    assert {flag.removeprefix("no-") for flag in engine_flags.OWNED_FLAGS} <= known
    assert known >= engine_flags.RESERVED_FLAGS


@pytest.mark.parametrize(
    ("dtype", "size", "caching"),
    list(itertools.product([d.value for d in DType], BLOCK_SIZES, ["Enabled", "Disabled"])),
)
def test_rendered_arguments_mean_to_the_engine_what_the_spec_says(dtype: str, size: int, caching: str) -> None:
    spec = spec_of(
        {
            "dtype": dtype,
            "blockSize": size,
            "maxModelLength": 4096,
            "maxBatchedTokens": 1024,
            "maxSequences": 32,
            "kvCache": {"memoryPercent": 85},
            "prefixCaching": caching,
            "extraArgs": ["--seed", "7", "--lenient"],
        },
        drain={"timeout": "1m30s"},
    )
    config = engine_reads(engine_contract.engine_args(spec, model_path="/models/m"))
    assert config.model.path == Path("/models/m")
    assert (config.model.dtype, config.model.max_model_len, config.model.seed) == (dtype.lower(), 4096, 7)
    assert (config.cache.block_size, config.cache.kv_cache_memory_bytes) == (size, None)
    assert config.cache.gpu_memory_utilization == pytest.approx(0.85)
    assert config.cache.enable_prefix_caching is (caching == "Enabled")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (32, 1024)
    assert config.server.served_model_names == ("org/Chat",)
    assert (config.server.host, config.server.port) == ("0.0.0.0", engine_contract.HTTP_PORT)
    assert (config.server.drain_timeout_seconds, config.server.lenient) == (90.0, True)


def test_a_local_replica_is_told_its_port_threads_and_cache() -> None:
    spec = spec_of({})
    args = engine_contract.engine_args(
        spec, model_path="m", host="127.0.0.1", port=40001, kv_cache_bytes=1_000_001, threads=3
    )
    config = engine_reads(args)
    assert (config.server.host, config.server.port, config.threads) == ("127.0.0.1", 40001, 3)
    assert config.cache.kv_cache_memory_bytes == 1_000_001
    assert engine_reads(engine_contract.engine_args(spec_of({"kvCache": {"size": "1Gi"}}), model_path="m")).cache == (
        engine_reads(["--model", "m", "--kv-cache-memory-bytes", str(2**30)]).cache
    )


def test_what_neither_says_is_the_same_on_both_sides() -> None:
    """A default of the spec that differs from the engine's would change what an upgrade of either does."""
    ours = engine_reads(engine_contract.engine_args(spec_of({}), model_path="m"))
    theirs = engine_reads(["--model", "m", "--served-model-name", "org/Chat"])
    assert ours == theirs


@given(*[st.integers(1, 10_000)] * 3, st.sampled_from([1, 2, 4]))
def test_both_count_the_same_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> None:
    assert capacity.kv_bytes_per_token(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes
    ) == kv_bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)


@pytest.mark.parametrize("asked", DType)
@pytest.mark.parametrize("feature", ["avx2", "avx512_bf16", "amx_bf16"])
def test_both_choose_the_same_arithmetic_on_a_cpu(asked: DType, feature: str, tmp_path: Path) -> None:
    from quire_engine.runner.arithmetic import dtype_name, resolve_dtype

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"flags : fpu {feature}\n")
    fast = this_machine(tmp_path).multiplies_bfloat16
    ours = capacity.compute_dtype(asked, "bfloat16", device="cpu", cpu_multiplies_bfloat16=fast)
    theirs = resolve_dtype(asked.value.lower(), frozenset({"fpu", feature}))  # type: ignore[arg-type]
    assert ours == dtype_name(theirs)


def free_flags() -> list[str]:
    taken = {*engine_flags.OWNED_FLAGS, *engine_flags.RESERVED_FLAGS}
    return [name for name in flag_table.FLAGS if name not in taken]


VALUES = [
    "0",
    "1",
    "-1",
    "3.5",
    "8",
    "x",
    "",
    "true",
    "auto",
    "none",
    "dummy",
    "json",
    "info",
    "2m",
    "1GiB",
    "1k",
    "0GiB",
    "9" * 30,
]


@pytest.mark.parametrize("name", free_flags())
@pytest.mark.parametrize("value", [None, *VALUES])
def test_an_extra_argument_is_refused_here_exactly_where_the_engine_refuses_it(name: str, value: str | None) -> None:
    args = [f"--{name}"] if value is None else [f"--{name}={value}"]
    try:
        flags.parse(["--model", "m", *args], {})
        engine_accepts = True
    except FlagsError:
        engine_accepts = False
    problems = engine_flags.extra_args_problems(args)
    assert (problems == []) is engine_accepts, problems
