#!/usr/bin/env python3
"""Send the same requests to quire and to vLLM, both in float32 on the demo model, and list what deviates.

    python -m benchmarks.serving.differential [--requests 500] [--seed 0] [--json FILE]

Requests are a seeded draw over routes, fields and invalid values. Statuses, texts, reasons to finish, usage, tokens and
logprobs are compared; messages of errors are not. Greedy answers that part where the two best tokens are nearly equal
are counted apart. Deviations are grouped by family of request and by field; docs/openai-compatibility.md names the
reason for each. vLLM is installed by ``make peers``.
"""

import asyncio
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.report import (
    DEMO_MODEL,
    at_least_one,
    interrupt_on_terminate,
    machine,
    parser,
    progress,
    show_table,
    write_json,
)
from benchmarks.serving.comparison.process_tree import ServerError
from benchmarks.serving.comparison.started import start
from benchmarks.serving.differential.answers import Answer, answer
from benchmarks.serving.differential.asked import COMPLETIONS, Asked, Limits, draw
from benchmarks.serving.differential.deviations import NEAR_TIE, Deviation, deviations, parting

_SERVERS = ("quire-f32", "vllm-f32")
_SHOWN = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A request with both answers and what deviates; ``near_tie`` says that the model itself was undecided."""

    asked: Asked
    quire: Answer
    peer: Answer
    found: tuple[Deviation, ...]
    near_tie: bool = False


async def compare(urls: Sequence[str], requests: Sequence[Asked]) -> list[Compared]:
    """Send each request to both servers at once, one request after another."""
    compared = []
    async with aiohttp.ClientSession() as client:
        with progress() as shown:
            for asked in shown.track(requests, description="requests"):
                quire, peer = await asyncio.gather(*(answer(client, url, asked) for url in urls))
                found = tuple(deviations(asked, quire, peer))
                near = bool(found) and await _near_tie(client, urls, asked, found)
                compared.append(Compared(asked=asked, quire=quire, peer=peer, found=found, near_tie=near))
    return compared


async def _near_tie(
    client: aiohttp.ClientSession, urls: Sequence[str], asked: Asked, found: Sequence[Deviation]
) -> bool:
    """Return whether the texts differ only because two tokens were nearly equal: asked again, with logprobs."""
    if not any("text" in each.field or "content" in each.field for each in found):
        return False
    if asked.path != COMPLETIONS or not isinstance(asked.body, Mapping):
        return False
    body = {**asked.body, "logprobs": 2, "n": 1, "stream": False, "echo": False}
    body.pop("stream_options", None)
    again = replace(asked, body=body)
    gap = parting(*await asyncio.gather(*(answer(client, url, again) for url in urls)))
    return gap is not None and gap <= NEAR_TIE


def rows(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return a row per family and field that deviates: how often, and the first example."""
    seen: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], Deviation] = {}
    for each in compared:
        if each.near_tie:
            continue
        for deviation in each.found:
            key = (each.asked.family, _general(deviation.field))
            seen[key] += 1
            examples.setdefault(key, deviation)
    return [
        (family, field, str(count), _short(examples[family, field].quire), _short(examples[family, field].peer))
        for (family, field), count in sorted(seen.items())
    ]


def _general(field: str) -> str:
    """Return a field's path without its places in lists."""
    return "".join(part.partition("]")[2] if "]" in part else part for part in field.split("["))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def measure(arguments: Namespace) -> list[Compared]:
    """Start both servers and compare their answers. Raise SystemExit if one cannot take part."""
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    limits = Limits(vocabulary=int(config["vocab_size"]), context=min(4096, int(config["max_position_embeddings"])))
    with ExitStack() as stack:
        urls = [start(stack, name, arguments.model) for name in _SERVERS]
        requests = draw(arguments.requests, seed=arguments.seed, limits=limits)
        return asyncio.run(compare(urls, requests))


def main() -> None:
    """Run the comparison."""
    options = parser(__doc__, plot=False)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the demo model")
    options.add_argument("--requests", type=at_least_one, default=500, help="default: 500")
    options.add_argument("--seed", type=int, default=0, help="of the draw of requests; default: 0")
    arguments = options.parse_args()
    interrupt_on_terminate()
    try:
        compared = measure(arguments)
    except ServerError as error:
        raise SystemExit(str(error)) from None
    equal = sum(not each.found for each in compared)
    near = sum(each.near_tie for each in compared)
    other = len(compared) - equal - near
    columns = ("requests", "field", "times", "quire", "vLLM")
    notes = [f"{len(compared)} requests: {equal} agree, {near} part at near ties, {other} deviate", machine()]
    show_table("Deviations", columns, rows(compared), notes)
    if arguments.json is not None:
        write_json(
            arguments.json, {"machine": machine(), "deviating": [asdict(each) for each in compared if each.found]}
        )


if __name__ == "__main__":
    main()
