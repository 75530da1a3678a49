"""From a command line and an environment to an ``EngineConfig``, or to ``FlagsError`` with every problem.

Flags stand above ``QUIRE_ENGINE_*`` variables, which stand above defaults; the flags themselves are in ``flag_table``.
Reads no file but the cgroup's CPU quota, and knows nothing of models or HTTP.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from quire_engine.config import (
    AccessOptions,
    AdmissionOptions,
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    EngineProcessOptions,
    LogOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    TextOptions,
    TlsOptions,
)
from quire_engine.cpu_quota import usable_cpus
from quire_engine.errors import FlagsError
from quire_engine.flag_kinds import Flag, Switch
from quire_engine.flag_table import ENV_PREFIX, FLAGS, variable_of

# Flags that people bring from elsewhere, and why they need none here.
_ELSEWHERE = {
    "api-key": "a key on the command line shows in the process list; put it in a file for --api-key-file",
    "cuda-graph-sizes": "its name is --cudagraph-capture-sizes",
    "enable-chunked-prefill": "long prompts always run in chunks; see --max-num-batched-tokens",
    "tokenizer": "the tokenizer is read from the model's folder",
}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """The configuration, or FlagsError with every problem found."""
    problems: list[str] = []
    values = _from_environment(environ, problems) | _from_command_line(argv, problems)
    _check_together(values, problems)
    if problems:
        raise FlagsError(problems)
    return _configuration(lambda name: _value(values, name))


class _Parser(argparse.ArgumentParser):
    """argparse that raises what it would have exited with."""

    def error(self, message: str) -> NoReturn:
        raise FlagsError(
            [re.sub(r"^argument (--[\w-]+)\S*: ignored explicit argument", r"\1: takes no value, not", message)]
        )


def _from_command_line(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    try:
        known, unknown = _parser().parse_known_args(list(argv))
    except FlagsError as error:
        problems.extend(error.problems)
        return {"model": None}
    given: dict[str, Any] = vars(known)
    positional = given.pop("model_positional", None)
    unknown_flags = [argument for argument in unknown if argument.startswith("-")]
    problems.extend(_unknown_flag(argument) for argument in unknown_flags)
    if not unknown_flags:  # else a word without a flag may be the value of the unknown one
        problems.extend(f"unexpected argument {argument!r}: there is one model" for argument in unknown)
        if positional is not None and given.get("model", positional) != positional:
            problems.append(f"the model is given twice: {positional} and --model {given['model']}")
    if positional is not None:
        given.setdefault("model", positional)
    return {name: _parsed(FLAGS[name], text, f"--{name}", problems) for name, text in given.items()}


def _parser() -> _Parser:
    parser = _Parser(prog="quire-engine", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_positional", nargs="?")
    for name, flag in FLAGS.items():
        if isinstance(flag.kind, Switch):
            parser.add_argument(f"--{name}", dest=name, action="store_const", const="true")
            if flag.kind.negatable:
                parser.add_argument(f"--no-{name}", dest=name, action="store_const", const="false")
        elif flag.many:
            parser.add_argument(f"--{name}", dest=name, nargs="*", action="extend")
        else:  # a missing value is None, so that it is one problem among the others and not the end of parsing
            parser.add_argument(f"--{name}", dest=name, nargs="?", const=None)
    return parser


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    by_variable = {variable_of(flag): flag for flag in FLAGS.values()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or _is_service_link(variable, text):
            continue
        flag = by_variable.get(variable)
        if flag is None:
            near = difflib.get_close_matches(variable, by_variable, n=1)
            problems.append(f"variable {variable} is unknown" + (f"; did you mean {near[0]}?" if near else ""))
        elif text != "":
            values[flag.name] = _parsed(flag, text.split() if flag.many else text, variable, problems)
    return values


def _is_service_link(variable: str, text: str) -> bool:
    """Kubernetes describes a Service named quire-engine to every pod in variables that look like ours."""
    return "://" in text or re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_", variable) is not None


def _parsed(flag: Flag, text: str | list[str] | None, where: str, problems: list[str]) -> Any:
    if text is None or text == []:
        problems.append(f"{where}: a value is missing; it takes {flag.help}")
        return None
    try:
        return tuple(flag.kind.parse(item) for item in text) if isinstance(text, list) else flag.kind.parse(text)
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return None


def _unknown_flag(argument: str) -> str:
    name = argument.lstrip("-").partition("=")[0]
    if hint := _ELSEWHERE.get(name):
        return f"--{name} does not exist here: {hint}"
    near = difflib.get_close_matches(name.replace("_", "-"), FLAGS, n=1, cutoff=0.5)
    return f"--{name} is unknown" + (f"; did you mean --{near[0]}?" if near else "")


def _check_together(values: dict[str, Any], problems: list[str]) -> None:
    problems.extend(
        f"--{name} is missing: {flag.help}" for name, flag in FLAGS.items() if flag.required and name not in values
    )
    for name in ("tensor-parallel-size", "pipeline-parallel-size"):
        if (values.get(name) or 1) > 1:
            problems.append(f"--{name} {values[name]}: this version runs on one device; 1 is the only value")
    for name in ("ssl-keyfile", "ssl-keyfile-password-file", "ssl-ca-certs"):
        if name in values and "ssl-certfile" not in values:
            problems.append(f"--{name} needs --ssl-certfile: without the server's certificate there is no TLS")
    tokens, sequences = _value(values, "max-num-batched-tokens"), _value(values, "max-num-seqs")
    if tokens is not None and sequences is not None and tokens < sequences:
        problems.append(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}: "
            "a step must have room for one token of each sequence"
        )
    if _value(values, "preemption-mode") == "swap" and _value(values, "swap-space-bytes") == 0:
        problems.append(
            "--preemption-mode swap has no swap space: give it some, such as --swap-space-bytes 1GiB, or let "
            "--preemption-mode be auto"
        )
    problems.extend(_device_problems(values))


def _device_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What contradicts itself whatever the machine is."""
    on_cpu, sizes = _value(values, "device") == "cpu", _value(values, "cudagraph-capture-sizes")
    if on_cpu and _value(values, "kv-cache-dtype") == "fp8":
        yield "--kv-cache-dtype fp8 needs a GPU, and --device is cpu: leave one of them out"
    if _value(values, "quantization") == "int8" and _value(values, "device") == "cuda":
        yield "--quantization int8 is for CPUs, and --device is cuda: leave one of them out"
    if sizes and on_cpu:
        yield "--cudagraph-capture-sizes is for a GPU, and --device is cpu: leave one of them out"
    if sizes and _value(values, "enforce-eager"):
        yield "--cudagraph-capture-sizes and --enforce-eager contradict each other: leave one of them out"
    most = _value(values, "max-num-seqs")
    if sizes and most is not None and max(sizes) > most:
        yield f"--cudagraph-capture-sizes {max(sizes)}: no step has more sequences than --max-num-seqs {most}"
    if _value(values, "deterministic") and _value(values, "model-impl") == "transformers":
        yield (
            "--deterministic is for quire's own model families, and --model-impl transformers asks for other code: "
            "leave one of them out"
        )


def _value(values: Mapping[str, Any], name: str) -> Any:
    """What was given, else the default. None where there is neither, and where what was given is wrong."""
    default = FLAGS[name].default
    if name in values or default is None:
        return values.get(name)
    return FLAGS[name].kind.parse(default)


def _configuration(get: Callable[[str], Any]) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(
            path=get("model"),
            dtype=get("dtype"),
            quantization=get("quantization"),
            load_format=get("load-format"),
            model_impl=get("model-impl"),
            trust_remote_code=get("trust-remote-code") or False,
            max_model_len=get("max-model-len"),
            seed=get("seed"),
        ),
        cache=CacheOptions(
            block_size=get("block-size"),
            kv_cache_memory_bytes=get("kv-cache-memory-bytes"),
            kv_cache_dtype=get("kv-cache-dtype"),
            gpu_memory_utilization=get("gpu-memory-utilization"),
            enable_prefix_caching=get("enable-prefix-caching"),
            swap_space_bytes=get("swap-space-bytes"),
        ),
        scheduler=SchedulerOptions(
            max_num_seqs=get("max-num-seqs"),
            max_num_batched_tokens=get("max-num-batched-tokens"),
            policy=get("scheduling-policy"),
            preemption_mode=get("preemption-mode"),
            max_generation_stall_seconds=get("max-generation-stall"),
            check_integrity=get("check-integrity") or False,
        ),
        server=_server_options(get),
        threads=get("threads") or usable_cpus(),
        device=DeviceOptions(
            device=get("device"),
            enforce_eager=get("enforce-eager") or False,
            cudagraph_capture_sizes=get("cudagraph-capture-sizes"),
            cpu_level=get("cpu-level"),
            deterministic=get("deterministic") or False,
        ),
        text=TextOptions(chat_template=get("chat-template"), generation_config=get("generation-config")),
        log=LogOptions(level=get("log-level"), format=get("log-format"), requests=get("log-requests") or False),
        engine_process=EngineProcessOptions(
            hang_timeout_seconds=get("engine-hang-timeout"), start_timeout_seconds=get("engine-start-timeout")
        ),
    )


def _server_options(get: Callable[[str], Any]) -> ServerOptions:
    return ServerOptions(
        host=get("host"),
        port=get("port"),
        uds=get("uds"),
        allowed_origins=get("allowed-origins") or (),
        served_model_names=get("served-model-name") or (),
        drain_timeout_seconds=get("drain-timeout"),
        lenient=get("lenient") or False,
        max_body_bytes=get("max-body-bytes"),
        max_logprobs=get("max-logprobs"),
        admission=AdmissionOptions(
            max_queued_requests=get("max-queued-requests"),
            max_queued_tokens=get("max-queued-tokens"),
            max_queue_seconds=get("max-queue-time"),
        ),
        access=AccessOptions(
            api_key_file=get("api-key-file"),
            admin_key_file=get("admin-key-file"),
            metrics_key_file=get("metrics-key-file"),
        ),
        tls=_tls_options(get),
        otlp_traces_endpoint=get("otlp-traces-endpoint"),
    )


def _tls_options(get: Callable[[str], Any]) -> TlsOptions | None:
    if get("ssl-certfile") is None:
        return None
    return TlsOptions(
        certfile=get("ssl-certfile"),
        keyfile=get("ssl-keyfile"),
        keyfile_password_file=get("ssl-keyfile-password-file"),
        ca_certs=get("ssl-ca-certs"),
    )
