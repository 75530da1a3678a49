import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import FlagsError
from quire_engine.config import SpeculationOptions
from quire_engine.cpu_quota import usable_cpus
from quire_engine.flag_table import FLAGS
from quire_engine.flags import parse


def problems_of(argv: list[str], environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(FlagsError) as caught:
        parse(argv, environ or {})
    return caught.value.problems


def test_model_is_the_only_required_argument() -> None:
    config = parse(["--model", "m"], {})
    assert config.model.path == Path("m")
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
    assert config.threads == usable_cpus()
    assert parse(["m"], {}) == config


EVERY_FLAG = """\
--model m --served-model-name a b --dtype float32 --load-format dummy --max-model-len 100
    --model-impl native --trust-remote-code --device cuda --cudagraph-capture-sizes 1 8 --deterministic
    --cpu-level avx2
    --revision v1 --download-dir d --root-path /llm --default-chat-template-kwargs {"a":1}
    --hf-overrides {"vocab_size":7} --override-generation-config {"top_k":5} --tokenizer tok
    --runner pooling --pooler-config {"pooling_type":"MEAN","normalize":false}
    --tool-call-parser hermes --reasoning-parser none
    --chat-template t.jinja --generation-config none --seed 7 --max-num-seqs 8 --max-num-batched-tokens 64
    --scheduling-policy fair --max-generation-stall 100ms --preemption-mode swap --swap-space-bytes 1MiB
    --check-integrity --block-size 32 --kv-cache-memory-bytes 512MiB
    --kv-cache-dtype fp8 --gpu-memory-utilization 0.5
    --no-enable-prefix-caching --share-prefixes all
    --tensor-parallel-size 1 --data-parallel-size 1 --pipeline-parallel-size 1 --threads 3
    --nnodes 1 --node-rank 0 --master-addr leader.example --master-port 7000 --distributed-timeout-seconds 5
    --group-secret-file gs
    --host 127.0.0.1
    --port 1234 --drain-timeout 90s --resumable-streams --lenient
    --max-body-bytes 1KiB --body-memory 1MiB --sse-keepalive-seconds 15
    --max-logprobs 5 --max-queued-requests 9
    --max-queued-tokens 99 --max-queue-time 500ms --api-key-file k --admin-key-file ak --metrics-key-file mk
    --log-level debug --log-format json --log-requests --uds s --allowed-origins https://a.example http://b:8080/
    --engine-hang-timeout 5s --engine-start-timeout 1m --ssl-certfile c --ssl-keyfile ck --ssl-keyfile-password-file p
    --enable-lora --max-loras 8 --max-lora-rank 32 --max-cpu-loras 99 --lora-modules fr=./fr
    --adapters-file adapters.json --adapter-roots ./fr ./de
    --ssl-ca-certs ca --otlp-traces-endpoint http://c:4318"""


SECRET = ("--group-secret-file", "s")


def test_every_flag_reaches_the_configuration() -> None:
    argv = EVERY_FLAG.split()
    given_flags = {argument.removeprefix("--").removeprefix("no-") for argument in argv if argument.startswith("--")}
    assert given_flags == set(FLAGS.flags) - {
        *("enforce-eager", "quantization", "api-key", "spec-method", "spec-tokens", "speculative-config"),
        *("spec-model", "spec-required"),
    }, "all that can be combined"
    config = parse(argv, {})
    changed = {"server.tls": config.server.tls, **_leaves(config)}
    untouched = [name for name, value in _leaves(parse(["m"], {})).items() if changed[name] == value]
    # The model is m in both, and no flag sets the features of the CPU, what the folder says, or how often an engine
    # process is restarted.
    assert sorted(untouched) == [
        "cpu",
        "device.enforce_eager",
        "engine_process.close_timeout_seconds",
        "engine_process.restart_delays_seconds",
        "engine_process.restart_window_seconds",
        "model.path",
        "model.quantization",
        "parallel.node_rank",
        "parallel.nodes",
        "parallel.pipeline",
        "parallel.tensor",
        "pooling",
        "server.access.api_keys",
        "speculation",
    ]
    assert parse(["m", "--enforce-eager"], {}).device.enforce_eager
    assert parse(["m", "--api-key", "a", "b"], {}).server.access.api_keys == ("a", "b")
    assert parse(["m", "--quantization", "int8"], {}).model.quantization == "int8"
    assert config.device.cudagraph_capture_sizes == (1, 8)
    assert (config.cache.kv_cache_memory_bytes, config.cache.swap_space_bytes) == (512 * 2**20, 2**20)
    assert config.scheduler.max_generation_stall_seconds == 0.1
    assert config.server.drain_timeout_seconds == 90.0
    assert config.server.allowed_origins == ("https://a.example", "http://b:8080")
    assert config.engine_process.start_timeout_seconds == 60.0
    assert config.server.admission.max_queue_seconds == 0.5
    assert config.adapters.modules == (("fr", "./fr"),) and config.adapters.roots == (Path("./fr"), Path("./de"))


def test_adapters_in_memory_follow_from_the_slots() -> None:
    assert parse(["m", "--enable-lora", "--max-loras", "8"], {}).adapters.max_cpu_loras == 32
    assert parse(["m", "--adapters-file", "f"], {}).adapters.enabled and not parse(["m"], {}).adapters.enabled
    module = '{"name": "fr", "path": "org/fr", "base_model_name": "m"}'
    assert parse(["m", "--enable-lora", "--lora-modules", module], {}).adapters.modules == (("fr", "org/fr"),)


def _leaves(value: object, prefix: str = "") -> dict[str, object]:
    if not hasattr(value, "__dataclass_fields__"):
        return {prefix: value}
    return {
        path: leaf
        for name in value.__dataclass_fields__
        for path, leaf in _leaves(getattr(value, name), f"{prefix}.{name}".lstrip(".")).items()
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", None),
        ("--spec-method none", None),
        ("--spec-method ngram", SpeculationOptions()),
        ("--spec-method ngram --spec-tokens 15", SpeculationOptions(max_tokens=15)),
        ("--spec-method ngram --spec-tokens 31 --block-size 32", SpeculationOptions(max_tokens=31)),
        ("--spec-model d", SpeculationOptions(method="draft_model", model=Path("d"))),
        (
            "--spec-method draft_model --spec-model d --spec-tokens 3 --no-spec-required",
            SpeculationOptions(method="draft_model", model=Path("d"), max_tokens=3, required=False),
        ),
        (
            '-sc {"model":"org/d","num_speculative_tokens":3}',
            SpeculationOptions(method="draft_model", model=Path("org/d"), max_tokens=3),
        ),
        (
            '-sc {"method":"draft_model","model":"d","required":false}',
            SpeculationOptions(method="draft_model", model=Path("d"), required=False),
        ),
        ('-sc {"method":"ngram"}', SpeculationOptions()),
        ('-sc {"model":"[ngram]","num_speculative_tokens":3}', SpeculationOptions(max_tokens=3)),
        ('-sc {"method":"ngram","prompt_lookup_max":6}', SpeculationOptions(shortest_match=6, longest_match=6)),
        ("-sc.method ngram -sc.prompt_lookup_min 3", SpeculationOptions(shortest_match=3, longest_match=3)),
        (
            '--speculative-config {"method":"ngram","prompt_lookup_min":2,"prompt_lookup_max":5}',
            SpeculationOptions(shortest_match=2, longest_match=5),
        ),
    ],
)
def test_speculation_is_read_from_plain_flags_and_from_json(
    arguments: str, expected: SpeculationOptions | None
) -> None:
    assert parse(["m", *arguments.split()], {}).speculation == expected


def test_flags_win_over_variables_and_these_over_defaults() -> None:
    environ = {"QUIRE_ENGINE_MAX_NUM_SEQS": "32", "QUIRE_ENGINE_PORT": "9000", "QUIRE_ENGINE_LENIENT": "true"}
    config = parse(["m", "--port", "9001"], environ)
    assert (config.scheduler.max_num_seqs, config.server.port, config.server.lenient) == (32, 9001, True)


def test_variables_of_a_kubernetes_service_are_ignored() -> None:
    links = {
        "QUIRE_ENGINE_PORT": "tcp://10.0.0.1:8000",
        "QUIRE_ENGINE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_ENGINE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert parse(["m"], links) == parse(["m"], {})


def test_in_pods_of_the_operator_no_variable_sets_a_flag() -> None:
    """A key of a ConfigMap in ``envFrom`` could otherwise set what the spec sets, or what it may not set."""
    in_pod = {"QUIRE_FLAGS_ONLY": "1", "HOME": "/tmp"}
    assert parse(["m"], in_pod) == parse(["m"], {})
    (problem,) = problems_of(["m"], in_pod | {"QUIRE_ENGINE_PORT": "9000"})
    assert problem.startswith("the variable QUIRE_ENGINE_PORT is set, but in pods")


def test_every_problem_is_listed_at_once() -> None:
    found = problems_of(
        ["--prot=3", "--max-num-seqs", "zero", "--dtype", "double", "--data-parallel-size", "2", "--host"],
        {"QUIRE_ENGINE_SEEDS": "1"},
    )
    assert [re.match(r"\S+( \S+)?", problem)[0] for problem in found] == [  # type: ignore[index]
        "the variable",
        "--prot is",
        "--max-num-seqs: expected",
        "--dtype: expected",
        "--host: a",
        "--model is",
        "--data-parallel-size 2:",
    ]


def test_ranks_divide_the_threads() -> None:
    config = parse(["m", "-tp", "2", "--threads", "5"], {})
    assert (config.parallel.tensor, config.parallel.ranks, config.threads) == (2, 2, 2)
    config = parse(["m", "-tp", "2", "-pp", "4", "-n", "4", "-r", "3", "--threads", "5"], {"QUIRE_GROUP_SECRET": "s"})
    parallel = config.parallel
    assert (parallel.ranks, parallel.local_ranks, parallel.node_rank, config.threads) == (8, 2, 3, 2)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["m", "--spec-tokens", "4"], "--spec-tokens needs a method: add --spec-method ngram, or"),
        (["m", "--spec-method", "ngram", "--spec-tokens", "16"], "so at most 15; lower it, or raise --block-size"),
        (["m", "--spec-method", "mtp"], "--spec-method: expected"),
        (["m", "--spec-method", "ngram", "-sc", '{"method":"ngram"}'], "contradict each other"),
        (["m", "-sc", '{"method":"ngram","num_speculative_tokens":0}'], "num_speculative_tokens: 0 is not a whole"),
        (["m", "-sc", '{"method":"ngram","num_speculative_tokens":20}'], "num_speculative_tokens 20: the drafts"),
        (["m", "-sc", '{"method":"medusa","model":"org/heads"}'], "method: medusa; the methods are"),
        (["m", "-sc", "{}"], "method: missing; the methods are"),
        (["m", "--spec-method", "draft_model"], "--spec-method draft_model needs --spec-model"),
        (["m", "--spec-method", "ngram", "--spec-model", "d"], "--spec-model needs --spec-method draft_model"),
        (["m", "--spec-method", "eagle", "--spec-model", "h"], "(eagle was removed: use draft_model"),
        (["m", "-sc", '{"method":"eagle"}'], "--speculative-config method: eagle was removed: use draft_model"),
        (["m", "-sc", '{"method":"mtp","num_speculative_tokens":1}'], "--speculative-config method: mtp; the methods"),
        (["m", "-sc", '{"method":"eagle3","model":"h"}'], "--speculative-config method: eagle3; the methods"),
        (["m", "-sc", '{"method":"draft_model"}'], "--speculative-config model: is missing"),
        (["m", "-sc", '{"method":"ngram","required":0}'], "required: 0 is neither true nor false"),
        (["m", "-sc", '{"model":"d","required":"no"}'], "required: 'no' is neither true nor false"),
        (["m", "-sc", '{"method":"ngram","quantization":"fp8"}'], "--speculative-config quantization: is not known"),
        (
            ["m", "-sc", '{"method":"ngram","prompt_lookup_min":5,"prompt_lookup_max":2}'],
            "prompt_lookup_min: 5 is more than prompt_lookup_max 2",
        ),
        (["m", "-tp", "2", "--model-impl", "transformers"], "--tensor-parallel-size 2 is for quire's own"),
        (["m", "-tp", "4", "--threads", "3"], "--threads 3 is less than one for each of the 4 ranks"),
        (["m", "-tp", "65"], "--tensor-parallel-size: expected"),
        (["m", "-tp", "16", "-pp", "8"], "are 128 processes: at most 64"),
        (["m", "-tp", "4", "-n", "3", *SECRET], "--nnodes 3 does not divide the 4 processes"),
        (["m", "-n", "2", *SECRET], "--nnodes 2 does not divide the 1 processes"),
        (["m", "-tp", "2", "-n", "2"], "--nnodes 2 needs a secret that all nodes share"),
        (
            ["m", "-tp", "2", "-n", "2", "-r", "2", *SECRET],
            "--node-rank 2: with --nnodes 2, nodes have the numbers 0 to 1",
        ),
        (["m", "-r", "1"], "--node-rank 1: with --nnodes 1, nodes have"),
        (["m", "--prot", "1"], "--prot is unknown; did you mean --port?"),
        (["m", "--response-store-memory", "64MiB"], "--response-store-memory was removed: the engine stores no resp"),
        (["m", "--no-enable-lora", "--lora-modules", "a=./a"], "--lora-modules and --no-enable-lora contradict"),
        (["m", "--no-enable-lora", "--adapters-file", "a"], "--adapters-file and --no-enable-lora contradict"),
        (["m", "--enable-lora", "--lora-modules", "a"], "--lora-modules: expected NAME=PATH"),
        (["m", "--enable-lora", "--lora-modules", "a b=./a"], "is not a model name"),
        (["m", "--enable-lora", "--lora-modules", '{"name": 1}'], "--lora-modules: expected NAME=PATH"),
        (["m", "--enable-lora", "--lora-modules", '{"nme": 1}'], "unknown: nme"),
        (["m", "--enable-lora", "--lora-modules", "a=./a", "a=./b"], "--lora-modules a: the name is given twice"),
        (
            ["m", "--enable-lora", "--served-model-name", "a", "--lora-modules", "a=./a"],
            "--served-model-name gives this name to the base model",
        ),
        (["m", "--enable-lora", "--max-loras", "9", "--max-cpu-loras", "8"], "--max-cpu-loras 8 is less than --max-l"),
        (["m", "--max-num-seq", "1"], "did you mean --max-num-seqs?"),
        (["m", "--max_model_lens", "1"], "did you mean --max-model-len?"),
        (["m", "--api-key", "a b"], "expected a key without spaces"),
        (["m", "--port", "70000"], "--port: expected a whole number from 0 to 65535"),
        (["m", "--port", "80.5"], "--port: expected a whole number"),
        (["m", "--gpu-memory-utilization", "0"], "above 0 and up to 1"),
        (["m", "--gpu-memory-utilization", "nan"], "above 0 and up to 1"),
        (["m", "--kv-cache-memory-bytes", "4 apples"], "--kv-cache-memory-bytes: expected"),
        (["m", "--kv-cache-memory-bytes", "0"], "--kv-cache-memory-bytes: expected"),
        (["m", "--swap-space-bytes", "0.1"], "--swap-space-bytes: expected"),
        (["m", "--preemption-mode", "swap"], "set it, for example --swap-space-bytes 1GiB"),
        (["m", "--drain-timeout", "soon"], "--drain-timeout: expected a duration"),
        (["m", "--engine-hang-timeout", "0"], "more than 0"),
        (["m", "--ssl-keyfile", "k"], "--ssl-keyfile requires --ssl-certfile"),
        (["m", "--allowed-origins", "example.com"], "expected an origin such as https://"),
        (["m", "--allowed-origins", "https://a.example/path"], "expected an origin"),
        (
            ["m", "--otlp-traces-endpoint", "collector:4317"],
            "expected an http or https address such as http://collector:4318",
        ),
        (["m", "--block-size", "17"], "expected one of 16, 32, 64, 128"),
        (["m", "--max-num-seqs", "512", "--max-num-batched-tokens", "100"], "a step must have room"),
        (["m", "--data-parallel-size", "4"], "an engine serves one copy of its model"),
        (["m", "n"], "unexpected argument 'n'"),
        (["m", "--model", "n"], "given twice"),
        (["m", "--lenient=yes"], "--lenient: takes no value"),
        (["m", "--served-model-name"], "a value is missing"),
        (["m", "--port"], "a value is missing"),
        (["m", "--device", "gpu"], "expected one of auto, cpu, cuda, rocm"),
        (["m", "--device", "cpu", "--kv-cache-dtype", "fp8"], "needs a GPU, and --device is cpu"),
        (["m", "--device", "rocm", "--quantization", "int8"], "--quantization int8 is for CPUs, and --device is rocm"),
        (
            ["m", "--device", "rocm", "--quantization", "fp8"],
            "for GPUs of NVIDIA in this version, and --device is rocm",
        ),
        (["m", "--device", "cuda", "--quantization", "int8"], "--quantization int8 is for CPUs, and --device is cuda"),
        (["m", "--device", "cpu", "--quantization", "fp8"], "--quantization fp8 needs a GPU, and --device is cpu"),
        (["m", "--deterministic", "--quantization", "fp8"], "fp8 and --deterministic exclude each other"),
        (["m", "--device", "cpu", "--cudagraph-capture-sizes", "8"], "is for a GPU, and --device is cpu"),
        (["m", "--enforce-eager", "--cudagraph-capture-sizes", "8"], "contradict each other"),
        (["m", "--cudagraph-capture-sizes", "8", "257"], "no step has more sequences than --max-num-seqs 256"),
        (["m", "--cuda-graph-sizes", "8"], "use --cudagraph-capture-sizes"),
        (["m", "--deterministic", "--model-impl", "transformers"], "is for quire's own model families"),
        (["m", "--hf-overrides", "[1]"], "expected a JSON object"),
        (["m", "--hf-overrides", "{rope}"], "expected a JSON object, got '{rope}' ("),
        (["m", "--model-impl", "fake"], "expected one of auto, native, vllm, transformers"),
        (["~nobody-here/m"], "there is no such home folder"),
        ([], "--model is missing"),
    ],
)
def test_a_wrong_flag_is_explained(argv: list[str], part: str) -> None:
    (problem,) = problems_of(argv)
    assert part in problem


@given(st.lists(st.text(max_size=12), max_size=4), st.dictionaries(st.just("QUIRE_ENGINE_PORT"), st.text(max_size=5)))
def test_any_command_line_parses_or_raises_flags_error(argv: list[str], environ: dict[str, str]) -> None:
    try:
        parse(argv, environ)
    except FlagsError as error:
        assert error.problems


def test_the_schema_describes_every_flag_and_its_default() -> None:
    made = FLAGS.schema()
    json.dumps(made)
    assert set(made["properties"]) == set(FLAGS.flags) and made["required"] == ["model"]
    for name, flag in FLAGS.flags.items():
        described = made["properties"][name]
        assert described["description"] == flag.help and described["x-env"] == FLAGS.variable(name)
        if flag.default is not None:
            assert described["default"] == flag.kind.parse(flag.default)


def test_help_names_every_flag_within_the_screen() -> None:
    text = FLAGS.help_text(width=100)
    assert all(f"--{name}" in text for name in FLAGS.flags)
    assert max(len(line) for line in text.splitlines() if line.startswith("  --")) <= 100


@pytest.mark.parametrize(
    ("own", "quotas", "cpus"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("3:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
    ],
)
def test_threads_follow_the_cpu_quota(tmp_path: Path, own: str, quotas: dict[str, str], cpus: int | None) -> None:
    for name, content in quotas.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(content)
    (tmp_path / "own").write_text(own)
    unlimited = usable_cpus(tmp_path / "nothing", tmp_path / "none")
    assert usable_cpus(tmp_path / "sys", tmp_path / "own") == (unlimited if cpus is None else cpus)


@pytest.mark.parametrize(("asked", "memory"), [("19MiB", 20), ("20MiB", 20), ("21MiB", 21)])
def test_the_budget_of_bodies_has_room_for_two(asked: str, memory: int) -> None:
    config = parse(["--model", "m", "--max-body-bytes", "10MiB", "--body-memory", asked], {})
    assert config.server.body_memory_bytes == memory * 2**20
