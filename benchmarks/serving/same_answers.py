#!/usr/bin/env python3
"""Send the same random requests to engines without and with speculation, and compare their answers byte for byte.

    python -m benchmarks.serving.same_answers [--requests 1000] [--methods ngram draft_model]

The engines serve the demo model with --deterministic and --check-integrity, a KV cache that is too small for the load,
and swap space, so that sequences are preempted. Layers of no effect make its step so slow that drafts pay. Requests
have every sampling parameter, several answers, logprobs, stop strings and grammars; some are cancelled. The command
ends with 1 if an answer differs or a counter shows that nothing was tried: no accepted draft, no preemption.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.models.variants import write_padded_model
from benchmarks.report import DEMO_MODEL, interrupt_on_terminate, machine, parser, progress, save, show_table
from benchmarks.serving.comparison.process_tree import ServerError, free_port, running
from benchmarks.serving.comparison.turns import seconds_to_first_token
from benchmarks.serving.draft_pairs import DRAFT

METHODS = ("ngram", "draft_model")
_CONCURRENCY = 12
_BLOCKS = 22
"""Blocks of the KV cache: the longest request needs 16 of them, and eight sequences together more than there are."""
_BLOCK_TOKENS = 16
_SUBJECTS = ("generators", "the with statement", "dictionaries", "slicings", "lambda expressions", "exceptions")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["list", "tuple", "set"]}, "mutable": {"type": "boolean"}},
    "required": ["name", "mutable"],
    "additionalProperties": False,
}
_GRAMMARS: Sequence[dict[str, Any]] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}},
    {"structured_outputs": {"regex": "(The [a-z]{2,9} ){2,5}end"}},
    {"structured_outputs": {"choice": ["a list", "a tuple", "a mapping"]}},
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The comparison of one method with the engine that does not speculate."""

    method: str
    requests: int
    cancelled: int
    different: int
    drafts: int
    accepted: int
    preemptions: int
    plain_preemptions: int


def random_body(chance: random.Random) -> dict[str, Any]:
    """Return a random request for chat; few tokens are probable, so that many drafts are accepted."""
    choose = chance.choice
    question = f"Explain {choose(_SUBJECTS)}."
    if chance.random() < 0.3:
        question = f"Repeat this: {question} {question} Then answer it."
    body: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": question}],
        "seed": chance.getrandbits(40),
        "max_tokens": chance.randrange(1, 64),
        "temperature": choose([0.0, 0.0, 0.3, 1.0]),
    }
    optional: dict[str, Any] = {
        "top_k": choose([2, 5, 40]),
        "top_p": choose([0.5, 0.9]),
        "min_p": choose([0.05, 0.2]),
        "n": choose([2, 3]),
        "logit_bias": {str(chance.randrange(5, 4096)): choose([-50, 4])},
        "stop": choose([["."], [" the", "\n"], ["expression"]]),
        "stop_token_ids": [chance.randrange(5, 4096)],
        "min_tokens": choose([1, 7]),
        "ignore_eos": True,
    }
    for name in chance.sample(sorted(optional), k=chance.randrange(0, 4)):
        body[name] = optional[name]
    if chance.random() < 0.15:
        body |= choose([{"presence_penalty": 0.7}, {"frequency_penalty": 0.4}, {"repetition_penalty": 1.2}])
    if chance.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": choose([0, 2])}
    if chance.random() < 0.15:
        body = {name: value for name, value in body.items() if name not in ("stop", "min_tokens", "ignore_eos")}
        body |= choose(_GRAMMARS)
    return body


def block_bytes(model: Path) -> int:
    """Return the bytes of a KV cache block of this model in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"]) * 2 * int(heads) * _BLOCK_TOKENS * 4


@contextmanager
def engine(folder: Path, model: Path, method: str | None, drafts: int) -> Iterator[str]:
    """Run an engine, and yield its address."""
    port = free_port()
    draft = DRAFT if method == "draft_model" else None
    cache_bytes = _BLOCKS * (block_bytes(model) + (0 if draft is None else block_bytes(draft)))
    command = [sys.executable, "-m", "quire_engine", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "model", "--dtype", "float32", "--deterministic", "--check-integrity"]
    command += ["--max-num-seqs", "8", "--max-model-len", "256", "--preemption-mode", "auto"]
    command += ["--kv-cache-memory-bytes", str(cache_bytes), "--swap-space-bytes", "16MiB"]
    command += ["--block-size", str(_BLOCK_TOKENS)]
    if method is not None:
        command += ["--spec-method", method, "--spec-tokens", str(drafts)]
        command += [] if draft is None else ["--spec-model", str(draft)]
    with running(command, {}, folder / f"{method}.log") as tree:
        try:
            asyncio.run(seconds_to_first_token(tree, f"http://127.0.0.1:{port}/v1"))
        except ServerError as error:
            raise SystemExit(str(error)) from None
        yield f"http://127.0.0.1:{port}"


async def answer_all(
    address: str, bodies: Sequence[dict[str, Any]], cancelled: set[int], done: Callable[[], None]
) -> tuple[list[Any], str]:
    """Return the answers in the order of the requests, None for a cancelled one, and the engine's metrics.

    Call ``done`` after each.
    """
    answers: list[Any] = [None] * len(bodies)
    places = iter(range(len(bodies)))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(address, timeout=timeout) as session:

        async def client() -> None:
            for place in places:
                if place in cancelled:
                    await _cancel(session, bodies[place])
                else:
                    answers[place] = await _answer(session, bodies[place])
                done()

        await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))
        async with session.get("/metrics") as response:
            return answers, await response.text()


async def _answer(session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    async with session.post("/v1/chat/completions", json=body) as response:
        found = await response.json()
    if response.status != 200:
        return {"status": response.status, "error": found}
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": found["choices"], "usage": usage}


async def _cancel(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post("/v1/chat/completions", json=body | {"stream": True, "max_tokens": 60}) as response:
        await response.content.readline()


def counter(metrics: str, name: str) -> int:
    """Return the sum of a counter's series."""
    return sum(int(float(value)) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE))


def compare(method: str, plain: tuple[list[Any], str], drafting: tuple[list[Any], str], cancelled: int) -> Compared:
    different = [place for place, pair in enumerate(zip(plain[0], drafting[0], strict=True)) if pair[0] != pair[1]]
    for place in different[:3]:
        print(f"{method}: answer {place} differs:\n  {plain[0][place]}\n  {drafting[0][place]}", file=sys.stderr)
    return Compared(
        method=method,
        requests=len(plain[0]),
        cancelled=cancelled,
        different=len(different),
        drafts=counter(drafting[1], "vllm:spec_decode_num_draft_tokens_total"),
        accepted=counter(drafting[1], "vllm:spec_decode_num_accepted_tokens_total"),
        preemptions=counter(drafting[1], "vllm:num_preemptions_total"),
        plain_preemptions=counter(plain[1], "vllm:num_preemptions_total"),
    )


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    options.add_argument("--drafts", type=int, default=7, help="--spec-tokens (default 7)")
    options.add_argument("--layers", type=int, default=30, help="further layers of no effect (default 30)")
    options.add_argument("--seed", type=int, default=0)
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()  # Engines have sessions of their own, and would outlive this process.
    chance = random.Random(arguments.seed)
    bodies = [random_body(chance) for _ in range(arguments.requests)]
    cancelled = set(range(7, arguments.requests, 23))
    found: dict[str | None, tuple[list[Any], str]] = {}
    with TemporaryDirectory(prefix="quire-same-answers-") as name, progress() as shown:
        model = Path(name) / "model"
        write_padded_model(model, DEMO_MODEL, arguments.layers)
        for method in (None, *arguments.methods):
            done = partial(shown.advance, shown.add_task(method or "no drafts", total=len(bodies)))
            with engine(Path(name), model, method, arguments.drafts) as address:
                found[method] = asyncio.run(answer_all(address, bodies, cancelled, done))
    results = [compare(method, found[None], found[method], len(cancelled)) for method in arguments.methods]
    refused = sum(isinstance(answer, dict) and "error" in answer for answer in found[None][0])
    show_table(
        "answers with and without speculation",
        ["method", "requests", "cancelled", "different", "drafts", "accepted", "preemptions", "without"],
        [[str(value) for value in asdict(result).values()] for result in results],
        (f"{refused} requests were refused by both; seed {arguments.seed}", machine()),
    )
    save(arguments.json, [asdict(result) for result in results])
    tried = all(min(result.accepted, result.preemptions, result.plain_preemptions) > 0 for result in results)
    if not tried or any(result.different for result in results):
        print(json.dumps([asdict(result) for result in results]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
