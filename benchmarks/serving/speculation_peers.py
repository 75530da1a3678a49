#!/usr/bin/env python3
"""Compare the speed-up by speculative decoding of quire with that of vLLM, on the same pair of models.

    python -m benchmarks.serving.speculation_peers [--layers 18] [--sequences 1 4]

Each of the two servers runs without and with speculation, on the demo model, padded with layers of no effect so that
its step costs several of the draft's. All four answer the same questions greedily, one server at a time and in turns.
The ratio of a server is that of its tokens per second with and without speculation. A server that does not start is
reported with the last lines of its log. vLLM is installed by ``make peers``.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.models.padded_model import write_padded_model
from benchmarks.report import DEMO_MODEL, at_least_one, interrupt_on_terminate
from benchmarks.serving.comparison.paired import Body, Result, in_turns, peers_parser, report, tokens_per_second
from benchmarks.serving.comparison.process_tree import ServerError
from benchmarks.serving.comparison.started import say, start
from benchmarks.serving.draft_pairs import DRAFT, SUBJECTS


def requests(sequences: int, answer: int, rounds: int) -> list[Iterator[Body]]:
    """Return the requests of so many clients, which share them, for ``rounds`` greedy answers of each."""
    shared = iter(
        [
            {
                "model": "model",
                "messages": [{"role": "user", "content": f"Explain {subject}."}],
                "max_tokens": answer,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            for subject in islice(cycle(SUBJECTS), sequences * rounds)
        ]
    )
    return [shared] * sequences


def compare(arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the speed-up of each server that starts with and without speculation."""
    draft = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": arguments.drafts}
    pairs: dict[str, tuple[str, str]] = {}
    with TemporaryDirectory(prefix="quire-padded-") as folder, ExitStack() as stack:
        write_padded_model(Path(folder), DEMO_MODEL, arguments.layers)
        for name in arguments.servers:
            try:
                urls = [
                    start(stack, name, Path(folder), flags)
                    for flags in ((), ("--speculative-config", json.dumps(draft)))
                ]
            except ServerError as error:
                say(str(error))
                continue
            pairs[name] = (urls[0], urls[1])
        for sequences in arguments.sequences:

            def measure(urls: tuple[str, str], sequences: int = sequences) -> tuple[float, float]:
                plain, speculating = (
                    tokens_per_second(
                        f"{url}/v1/chat/completions", requests(sequences, arguments.answer, arguments.rounds)
                    )
                    for url in urls
                )
                return plain, speculating

            for name, found in in_turns(pairs, arguments.runs, measure).items():
                yield Result.of(name, found, {"clients": sequences})


def parse_arguments() -> argparse.Namespace:
    options = peers_parser(__doc__)
    options.add_argument("--layers", type=int, default=18, help="the further layers of the target (default 18)")
    options.add_argument("--drafts", type=at_least_one, default=4, help="num_speculative_tokens (default 4)")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 4])
    options.add_argument("--answer", type=at_least_one, default=48, help="the tokens of each answer (default 48)")
    options.add_argument("--rounds", type=at_least_one, default=3, help="the answers of each client (default 3)")
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()
    report(
        f"speed-up by speculation (draft model, up to {arguments.drafts} drafts)",
        "speculating",
        list(compare(arguments)),
        f"answers of {arguments.answer} tokens, {arguments.runs} runs",
        arguments.json,
    )


if __name__ == "__main__":
    main()
