"""The operator's use of the engine matches the engine: flags, their values, and the arithmetic of the KV cache."""

import itertools
import json
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from fastapi.routing import APIRoute
from specs import valid_spec
from starlette.datastructures import Headers

from quire_common.contract import engine as engine_names
from quire_common.contract.gateway import ENGINE_KEY_HEADER
from quire_common.errors import FlagsError
from quire_common.key_file import KeyFile
from quire_common.model_memory import ModelConfig, parse_model_config
from quire_engine import flag_table, flags
from quire_engine.api.app import _ROUTES
from quire_engine.api.auth import ADMIN_PATHS, Access
from quire_engine.config import SECRET_VARIABLE, AccessOptions, EngineConfig, ParallelOptions
from quire_engine.errors import Forbidden, Unauthorized
from quire_gateway.headers import to_replica
from quire_gateway.tenants import TENANT, Tenants
from quire_operator.api import DType, Spec, engine_flags
from quire_operator.api.deployment import OWNED_FLAGS
from quire_operator.api.engine import BLOCK_SIZES
from quire_operator.capacity import fit as capacity
from quire_operator.deployment import engine_contract


def spec_of(engine: dict[str, object], **spec: object) -> Spec:
    return valid_spec(model={"source": "hf://a/b", "servedName": "org/Chat"}, engine=engine, **spec)


def engine_reads(args: list[str]) -> EngineConfig:
    return flags.parse(args, {})


def test_the_committed_flags_are_the_engines() -> None:
    assert json.loads(json.dumps(flag_table.FLAGS.schema()))["properties"] == engine_flags.flag_schema(), (
        "make engine-flags"
    )


def test_every_flag_that_quire_sets_exists() -> None:
    known = {*flag_table.FLAGS.flags, "help", "version", "flag-schema"}
    assert {flag.removeprefix("no-") for flag in OWNED_FLAGS} <= known
    assert known >= engine_flags.RESERVED_FLAGS


@pytest.mark.parametrize(("tensor", "cache_size"), [(1, None), (2, None), (2, 2**30)])
def test_the_engine_gets_the_ranks_of_the_spec(tensor: int, cache_size: int | None) -> None:
    """Sizes of memory are those of the replica in the spec, and those of a rank for the engine."""
    cache: dict[str, object] = {} if cache_size is None else {"kvCache": {"size": cache_size}}
    spec = spec_of({**cache, "swapSpace": "2Gi"}, parallelism={"tensor": tensor})
    args = engine_contract.engine_args(spec, model_path="/models/m")
    assert ("--tensor-parallel-size" in args) is (tensor > 1), "pod templates of one rank do not change"
    config = engine_reads(args)
    assert config.parallel.tensor == tensor
    assert config.cache.kv_cache_memory_bytes == (None if cache_size is None else cache_size // tensor)
    assert config.cache.swap_space_bytes == 2**31 // tensor


def test_pods_of_a_group_join_as_the_engine_expects() -> None:
    spec = spec_of({}, parallelism={"tensor": 2, "pipeline": 2, "nodes": 2})
    args = engine_contract.engine_args(spec, model_path="/models/m", join_seconds=1800)
    lws = {"$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "chat-group-0.chat-group.prod"}
    environ = {engine_names.GROUP_SECRET_VARIABLE: "0123456789abcdef"}
    parallel = flags.parse([lws.get(arg, arg) for arg in args], environ).parallel
    assert (parallel.tensor, parallel.pipeline, parallel.nodes, parallel.node_rank) == (2, 2, 2, 1)
    assert parallel.master_addr == "chat-group-0.chat-group.prod"
    assert parallel.master_port == engine_names.GROUP_PORT == ParallelOptions().master_port
    assert parallel.join_timeout_seconds == 1800
    assert engine_names.GROUP_SECRET_VARIABLE == SECRET_VARIABLE
    local = flags.parse(engine_contract.engine_args(spec, model_path="/models/m"), {}).parallel
    assert (local.ranks, local.nodes) == (4, 1), "quire up runs all ranks on one machine"


@pytest.mark.parametrize(
    ("dtype", "size", "caching"),
    list(zip([d.value for d in DType], BLOCK_SIZES, itertools.cycle(["Enabled", "Disabled"]), strict=False)),
)
def test_rendered_arguments_match_the_spec_in_the_engine(dtype: str, size: int, caching: str) -> None:
    spec = spec_of(
        {
            "dtype": dtype,
            "blockSize": size,
            "maxModelLength": 4096,
            "maxBatchedTokens": 1024,
            "maxSequences": 32,
            "kvCache": {"memoryPercent": 85},
            "prefixCaching": caching,
            "schedulingPolicy": "Fair",
            "preemption": "Swap",
            "swapSpace": "2Gi",
            "speculation": {"method": "NGram", "maxTokens": 12},
            "resumable": "Enabled",
            "extraArgs": ["--seed", "7", "--lenient"],
        },
        drain={"timeout": "1m30s"},
    )
    config = engine_reads(engine_contract.engine_args(spec, model_path="/models/m"))
    assert config.model.path == Path("/models/m")
    assert (config.model.dtype, config.model.max_model_len, config.model.seed) == (dtype.lower(), 4096, 7)
    assert (config.cache.block_size, config.cache.kv_cache_memory_bytes) == (size, None)
    assert config.cache.gpu_memory_utilization == pytest.approx(0.85)
    assert config.scheduler.enable_prefix_caching is (caching == "Enabled")
    assert (config.scheduler.policy, config.scheduler.preemption_mode) == ("fair", "swap")
    assert config.cache.swap_space_bytes == 2 * 2**30
    assert config.speculation is not None and config.speculation.max_tokens == 12
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (32, 1024)
    assert config.server.served_model_names == ("org/Chat",)
    assert (config.server.host, config.server.port) == ("0.0.0.0", engine_names.HTTP_PORT)
    assert (config.server.drain_timeout_seconds, config.server.lenient) == (90.0, True)
    assert config.server.resumable_streams and not engine_reads(["--model", "m"]).server.resumable_streams


@pytest.mark.parametrize("required", [True, False])
def test_engine_parses_the_draft_settings_of_the_spec(required: bool) -> None:
    speculation = {"method": "DraftModel", "draft": {"source": "hf://a/s"}, "maxTokens": 5, "required": required}
    spec = spec_of({"speculation": speculation})
    read = engine_reads(engine_contract.engine_args(spec, model_path="m", draft_path="/models/s")).speculation
    assert read is not None and (read.method, read.model) == ("draft_model", Path("/models/s"))
    assert (read.max_tokens, read.required) == (5, required)
    assert engine_reads(engine_contract.engine_args(spec, model_path="m")).speculation is None


def test_local_replica_gets_its_port_threads_and_cache() -> None:
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


def test_keys_are_required_by_spec_but_not_for_probes(tmp_path: Path) -> None:
    """The gateway and the operator scrape /metrics, and the kubelet probes, without a key."""
    file = tmp_path / "keys"
    file.write_text("name=team-a max_concurrent=2 first-key-of-all\n")
    args = engine_contract.engine_args(spec_of({}), model_path="m", api_key_file=str(file))
    access = Access(engine_reads(args).server.access, time.monotonic)
    for path in (engine_names.READY_PATH, engine_names.LIVE_PATH, engine_names.METRICS_PATH):
        assert access.check(path, Headers(), "10.0.0.9").tenant is None
    with pytest.raises(Unauthorized):
        access.check("/v1/models", Headers(), "10.0.0.9")
    for name, value in (("Authorization", "Bearer first-key-of-all"), (ENGINE_KEY_HEADER, "first-key-of-all")):
        request = make_mocked_request("POST", "/v1/completions", headers={name: value})
        passed_on = to_replica(request, audience="chat", request_id="1")
        assert access.check("/v1/models", Headers(dict(passed_on)), "10.0.0.9").tenant == "team-a"


def test_gateway_with_keys_states_the_tenant_to_engines(tmp_path: Path) -> None:
    """It also shows an engine on its own host that the client is elsewhere."""
    (tmp_path / "keys").write_text("team-a:first-key-of-all\n")
    keys = KeyFile(tmp_path / "keys", time.monotonic)
    request = make_mocked_request("POST", "/v1/completions", headers={"Authorization": "Bearer first-key-of-all"})
    tenant = request[TENANT] = Tenants(keys).tenant_of(keys.current[0])
    headers = Headers(dict(to_replica(request, audience="chat", request_id="1")))
    open_access = Access(AccessOptions(), time.monotonic)
    assert open_access.check("/v1/completions", headers, "10.0.0.9").tenant == tenant.value_for("chat")
    with pytest.raises(Forbidden):
        open_access.check("/admin/drain", headers, "127.0.0.1")
    own = Access(AccessOptions(api_key_file=tmp_path / "keys"), time.monotonic)
    with pytest.raises(Unauthorized):
        own.check("/v1/completions", headers, "10.0.0.9")


def test_gateways_pass_on_the_routes_of_clients_only() -> None:
    """A POST route of the engine is for clients, or its access is that of an administrator."""
    routes = [route for routes in _ROUTES for route in routes.router.routes if isinstance(route, APIRoute)]
    posts = {route.path for route in routes if "POST" in route.methods and "{" not in route.path}
    administrative = {path for path in posts if path.startswith("/admin/") or path in ADMIN_PATHS}
    assert posts - administrative == {*engine_names.CLIENT_PATHS}
    assert administrative == {"/admin/drain", "/admin/cache/reset", *ADMIN_PATHS}


def test_defaults_of_spec_and_engine_agree() -> None:
    """If a default of the spec differed from the engine's, an upgrade of either would change behaviour."""
    ours = engine_reads(engine_contract.engine_args(spec_of({}), model_path="m"))
    theirs = engine_reads(["--model", "m", "--served-model-name", "org/Chat"])
    assert ours == theirs


@pytest.mark.parametrize("args", [[], ["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype=fp8"]])
def test_operator_and_engine_agree_on_gpu_block_bytes(args: list[str]) -> None:
    """A GPU stores heads of 80 as they are; a CPU's attention would pad their values."""
    import torch

    from quire_engine.model.shape import ModelShape
    from quire_engine.runner.kv_cache import cache_groups

    body = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 640,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    model = parse_model_config(body)
    assert isinstance(model, ModelConfig) and model.head_dim == 80
    spec = spec_of({"extraArgs": args}, resources={"limits": {"nvidia.com/gpu": 1}})
    needs = capacity.footprint(spec, model, parameters=1, dtype="float16", device="gpu")
    config = engine_reads(engine_contract.engine_args(spec, model_path="m"))
    assert config.device.device == "cuda"
    shape = ModelShape(
        architecture="MistralForCausalLM",
        vocab_size=100,
        max_position_embeddings=4096,
        eos_token_ids=(),
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=80,
        hidden_size=640,
        intermediate_size=1280,
        windows=(None,) * 3,
    )
    dtype = torch.float8_e4m3fn if config.cache.kv_cache_dtype == "fp8" else torch.float16
    (group,) = cache_groups(shape, dtype, 16, torch.device("cuda"))
    assert group.block_bytes == 16 * needs.kv_bytes_per_token


# By what transformers runs: sinks, chunks, and layers of different heads.
RUN_BY_TRANSFORMERS: list[dict[str, object]] = [
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4},
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 9, "num_local_experts": 4},
    {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_local_experts": 2},
    {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_local_experts": 2,
        "attention_chunk_size": 9,
        "no_rope_layers": [1, 0, 1, 1, 0, 1, 1],
    },
    {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size_per_layer_input": 64},
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 64,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    },
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 64,
        "head_dim": 16,
        "per_layer_config": dict.fromkeys(("5", "6"), {"head_dim": 24, "num_key_value_heads": 1}),
    },
]


@pytest.mark.parametrize("fields", RUN_BY_TRANSFORMERS)
def test_operator_and_engine_agree_on_layers(fields: dict[str, object], tmp_path: Path) -> None:
    from quire_engine.model.transformers_backend.candidate import find_transformers_candidate

    raw = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **fields,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = parse_model_config(raw)
    assert isinstance(ours, ModelConfig), ours
    theirs = find_transformers_candidate(tmp_path, trust_remote_code=False).shape
    assert ours.windows == theirs.windows
    assert ours.kv_widths == tuple(heads.kv_heads * heads.head_dim for heads in theirs.layer_heads)


def free_flags() -> list[str]:
    taken = {*OWNED_FLAGS, *engine_flags.RESERVED_FLAGS}
    return [name for name in flag_table.FLAGS.flags if name not in taken]


VALUES = (
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
)


@pytest.mark.parametrize("name", free_flags())
def test_operator_refuses_the_arguments_that_the_engine_refuses(name: str) -> None:
    for args in ([f"--{name}"], *([f"--{name}={value}"] for value in (*VALUES, "9" * 30))):
        try:
            flags.parse(["--model", "m", *args], {})
            engine_accepts = True
        except FlagsError:
            engine_accepts = False
        problems = engine_flags.extra_args_problems(args, OWNED_FLAGS)
        assert (problems == []) is engine_accepts, (args, problems)
