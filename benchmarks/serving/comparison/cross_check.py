"""Another client beside ours: ``vllm bench serve`` asks one quire server the same, by turns with quire's own client.

The two must agree, or one of them measures itself. vLLM's client sends prompts as text, whose number of tokens differs
a little from what it was asked for; so throughput is compared by output tokens.
"""

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_catalogue import VLLM

from comparison.contestants import Contestant, Setting
from comparison.process_tree import ServerError, free_port, running
from comparison.results import Measured
from comparison.turns import Bench, Say, seconds_to_first_token
from comparison.workloads import Workload

_CLIENT_SECONDS = 600
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFigures:
    """What one client said of one server. Seconds."""

    output_tokens_per_second: float
    ttft_p50: float
    itl_p50: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """``vllm bench serve`` over ``quire bench``: medians of the rounds' ratios."""

    workload: str
    output_tokens_per_second: float
    ttft_p50: float
    itl_p50: float

    def __str__(self) -> str:
        return (
            f"`vllm bench serve` over `quire bench` on one quire server, {self.workload}, by turns:"
            f" output tokens/s {self.output_tokens_per_second:.3f}, TTFT p50 {self.ttft_p50:.3f},"
            f" ITL p50 {self.itl_p50:.3f}"
        )


def cross_check(bench: Bench, contestant: Contestant, workload: Workload, say: Say) -> CrossCheck:
    """Raises ServerError where the server or vLLM's client fails."""
    assert contestant.launches is not None
    setting = Setting(model=bench.model, port=free_port(), workloads=(workload,), say=say)
    (launch,) = contestant.launches(setting)
    base_url = f"http://127.0.0.1:{setting.port}"
    pairs = []
    with running(launch.command, launch.environment, bench.logs / "cross-check-server.log") as tree:
        asyncio.run(seconds_to_first_token(tree, f"{base_url}/v1"))
        for number in range(_ROUNDS):
            measured = asyncio.run(bench.measure(f"{base_url}/v1", workload, number))
            ours = figures_of(measured)
            theirs = _ask_vllm(bench, base_url, workload, measured.requests, number)
            say(f"cross-check, round {number + 1}: quire bench {ours}; vllm bench serve {theirs}")
            pairs.append((ours, theirs))
    return compared(str(workload), pairs)


def figures_of(measured: Measured) -> ClientFigures:
    return ClientFigures(
        output_tokens_per_second=measured.output_tokens_per_second,
        ttft_p50=measured.ttft_p50_seconds or 0.0,
        itl_p50=measured.itl_p50_seconds or 0.0,
    )


def figures_of_vllm(document: Mapping[str, Any]) -> ClientFigures:
    """From the file that ``vllm bench serve`` writes."""
    return ClientFigures(
        output_tokens_per_second=float(document["output_throughput"]),
        ttft_p50=float(document["median_ttft_ms"]) / 1e3,
        itl_p50=float(document["median_itl_ms"]) / 1e3,
    )


def compared(workload: str, pairs: Sequence[tuple[ClientFigures, ClientFigures]]) -> CrossCheck:
    """Of (ours, theirs) in each round."""

    def ratio(name: str) -> float:
        return float(statistics.median(getattr(theirs, name) / getattr(ours, name) for ours, theirs in pairs))

    return CrossCheck(
        workload=workload,
        output_tokens_per_second=ratio("output_tokens_per_second"),
        ttft_p50=ratio("ttft_p50"),
        itl_p50=ratio("itl_p50"),
    )


def _ask_vllm(bench: Bench, base_url: str, workload: Workload, requests: int, seed: int) -> ClientFigures:
    result = bench.logs / f"vllm-bench-serve-{seed}.json"
    command = [str(VLLM.environment / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", base_url]
    command += ["--endpoint", "/v1/completions", "--model", "model", "--tokenizer", str(bench.model)]
    command += ["--dataset-name", "random", "--random-input-len", str(workload.input_tokens)]
    command += ["--random-output-len", str(workload.output_tokens), "--num-prompts", str(requests)]
    command += ["--max-concurrency", str(workload.concurrency), "--ignore-eos", "--temperature", "0"]
    command += ["--seed", str(seed), "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    log = bench.logs / f"vllm-bench-serve-{seed}.log"
    with running(command, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}, log) as tree:
        status = tree.wait(_CLIENT_SECONDS)
        if status != 0 or not result.exists():
            raise ServerError(f"`vllm bench serve` ended with {status}:\n  {tree.last_words()}\nall of it: {log}")
    return figures_of_vllm(json.loads(Path(result).read_text(encoding="utf-8")))
