"""The servers under test, what each one needs, and the command that starts it with its best settings for this machine.

Every server gets the same model folder and every usable CPU, and runs without a prefix cache. This module knows whether
a peer is installed; benchmarks/peers knows how to install it.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.install_llama_cpp import SERVER, SOURCE, level_library
from benchmarks.peers.install_vllm import TCMALLOC_FOLDER
from benchmarks.peers.peer_catalogue import LLAMA_CPP, VLLM
from benchmarks.peers.peer_environments import Peer, peers_folder
from benchmarks.report import usable_cpus
from benchmarks.serving.comparison.client import Workload
from benchmarks.serving.comparison.levels import library_variables
from benchmarks.serving.comparison.process_tree import free_port
from benchmarks.serving.comparison.results import Family
from quire_engine.cpu.limits import CpuLevel

PEERS = Path(__file__).resolve().parents[2] / "peers"
KV_CACHE_GIB = 2
MAX_MODEL_LEN = 4096
_SPARE_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    workloads: tuple[Workload, ...]
    port: int | None = None
    """None means the port of the setting; starts of one server that run at the same time have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: Path
    port: int
    cpu_level: CpuLevel
    workloads: tuple[Workload, ...]
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """A server under test. ``missing`` returns the reason why it cannot take part here, or None."""

    name: str
    family: Family
    what: str
    missing: Callable[[], str | None]
    launches: Callable[[Setting], list[Launch]]


def servers_under_test() -> dict[str, ServerUnderTest]:
    """Return the servers by name, quire first."""
    everyone = [
        _quire("quire", "quire", "16-bit weights where the CPU is fast with them, else float32", "--dtype", "auto"),
        _quire("quire-f32", "quire", "float32 weights", "--dtype", "float32"),
        _quire("quire-int8", "quire-int8", "8-bit weights", "--quantization", "int8"),
        _vllm("vllm", VLLM, "bfloat16"),
        _vllm("vllm-f32", VLLM, "float32"),
        _llama_cpp("llama.cpp", "f16"),
        _llama_cpp("llama.cpp-q8_0", "q8_0"),
    ]
    return {server.name: server for server in everyone}


def _quire(name: str, family: Family, what: str, *flags: str) -> ServerUnderTest:
    return ServerUnderTest(
        name=name,
        family=family,
        what=what,
        missing=lambda: None,
        launches=lambda setting: _launch_quire(setting, *flags),
    )


def _launch_quire(setting: Setting, *flags: str) -> list[Launch]:
    command = [sys.executable, "-m", "quire_engine", "--model", str(setting.model), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", str(setting.port), "--no-enable-prefix-caching"]
    command += ["--kv-cache-memory-bytes", f"{KV_CACHE_GIB}GiB", "--max-model-len", str(_model_length(setting.model))]
    return [Launch(command=(*command, "--cpu-level", setting.cpu_level, *flags), workloads=setting.workloads)]


def _vllm(name: str, peer: Peer, dtype: str) -> ServerUnderTest:
    def launches(setting: Setting) -> list[Launch]:
        command = [str(peer.python), str(PEERS / "vllm_at_level.py"), "serve", str(setting.model)]
        command += ["--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(setting.port), "--dtype", dtype]
        command += ["--max-model-len", str(_model_length(setting.model)), "--no-enable-prefix-caching"]
        command += ["--uvicorn-log-level", "warning"]
        environment = vllm_environment(peer, setting.cpu_level)
        return [Launch(command=tuple(command), environment=environment, workloads=setting.workloads)]

    return ServerUnderTest(
        name=name,
        family="vllm",
        what=f"vLLM {peer.version} {dtype}",
        missing=lambda: _not_installed(peer, "install_vllm"),
        launches=launches,
    )


def vllm_environment(peer: Peer, cpu_level: CpuLevel) -> dict[str, str]:
    """Return the environment that its manual recommends for a dedicated machine: a thread on every CPU."""
    cpus = usable_cpus()
    tcmalloc = sorted((peer.folder / TCMALLOC_FOLDER).glob("usr/lib/*/libtcmalloc_minimal.so.*"))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "BENCHMARK_CPU_LEVEL": cpu_level,
        **library_variables(cpu_level),
        **({"LD_PRELOAD": str(tcmalloc[0])} if tcmalloc else {}),
    }


def _llama_cpp(name: str, outtype: str) -> ServerUnderTest:
    def launches(setting: Setting) -> list[Launch]:
        weights = gguf(setting.model, outtype, setting.say)
        library = LLAMA_CPP.folder / level_library(setting.cpu_level)
        starts = []
        for workload in setting.workloads:
            port = free_port()
            starts.append(
                Launch(
                    command=_llama_server(weights, port, workload),
                    environment={"GGML_BACKEND_PATH": str(library)},
                    workloads=(workload,),
                    port=port,
                )
            )
        return starts

    return ServerUnderTest(
        name=name,
        family="llama.cpp",
        what=f"llama.cpp's server, {outtype}",
        missing=lambda: _not_installed(LLAMA_CPP, "install_llama_cpp"),
        launches=launches,
    )


def _llama_server(weights: Path, port: int, workload: Workload) -> tuple[str, ...]:
    """Return the command with a slot per concurrent request, each with room for just this workload.

    Its attention then reads no more than necessary.
    """
    slot = workload.input_tokens + workload.output_tokens + _SPARE_TOKENS
    threads = str(len(usable_cpus()))
    command = [str(LLAMA_CPP.folder / SERVER), "--model", str(weights), "--alias", "model", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--parallel", str(workload.concurrency), "--cont-batching"]
    command += ["--ctx-size", str(slot * workload.concurrency), "--threads", threads, "--threads-batch", threads]
    command += ["--flash-attn", "on", "--batch-size", "2048", "--ubatch-size", "512"]
    # All prompts are different: neither a slot's last prompt nor copies of old ones in memory are useful.
    return (*command, "--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--log-verbosity", "2")


def gguf(model: Path, outtype: str, say: Callable[[str], None]) -> Path:
    """Return ``model`` converted by llama.cpp's own converter, cached. Raise OSError, CalledProcessError."""
    stamp = (
        f"{model.resolve()} {(model / 'config.json').read_text()} {(model / 'model.safetensors').stat().st_mtime_ns}"
    )
    name = f"{model.name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}-{outtype}.gguf"
    made = peers_folder() / "gguf" / name
    if not made.exists():
        say(f"writing {made}, once, by llama.cpp's converter")
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(".part")
        source = LLAMA_CPP.folder / SOURCE
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), str(source / "gguf-py")))}
        command = [str(LLAMA_CPP.python), str(PEERS / "llama_cpp_convert.py"), str(model), str(unfinished), outtype]
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        unfinished.rename(made)
    return made


def _not_installed(peer: Peer, script: str) -> str | None:
    return None if peer.installed else f"not installed: python -m benchmarks.peers.{script}"


def _model_length(model: Path) -> int:
    """Return the maximum length of prompt and answer, as the model's own limit allows."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return min(MAX_MODEL_LEN, int(config["max_position_embeddings"]))


def missing(chosen: Sequence[ServerUnderTest]) -> dict[str, str]:
    """Return the servers that cannot take part, with the reason."""
    return {server.name: why for server in chosen if (why := server.missing()) is not None}
