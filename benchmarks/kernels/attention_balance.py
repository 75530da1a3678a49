#!/usr/bin/env python3
"""Print how evenly attention's schedule divides batches among the multiprocessors of a GPU, which need not be present.

The share is the mean work of a multiprocessor divided by the largest: 100 % if all finish together. Work is the tokens
of context that its programs read. Program p runs on multiprocessor p modulo their number, and a multiprocessor's
programs share its bandwidth. The heads are those of Llama-3.1-8B.
"""

import argparse
from collections.abc import Sequence

from benchmarks.report import show_table
from quire_kernels.paged_attention.schedule import Rule, Schedule, schedule

CASES: dict[str, list[tuple[int, int]]] = {
    "decode 1 x 1,024": [(1, 1024)],
    "decode 1 x 8,192": [(1, 8192)],
    "decode 1 x 32,768": [(1, 32_768)],
    "decode 32 x 1,024": [(1, 1024)] * 32,
    "decode 32 x 8,192": [(1, 8192)] * 32,
    "decode 32 x 8,192 with a chunk of 16": [(1, 8192)] * 32 + [(16, 4096)],
    "decode 100 x 8,192": [(1, 8192)] * 100,
    "decode 255 x 512 and 1 x 32,768": [(1, 512)] * 255 + [(1, 32_768)],
    "verify 32 x 5 at 4,096": [(5, 4096)] * 32,
    "100 tokens behind 32,768": [(100, 32_768)],
    "100 tokens behind 131,072": [(100, 131_072)],
    "prompt of 8,192": [(8192, 8192)],
}
"""Queries and context of each sequence of a batch."""


def busy_share(made: Schedule, *, kv_heads: int, programs: Sequence[int], processors: int) -> float:
    """Return the mean work of a multiprocessor divided by the largest; ``programs`` are those of each list's launch."""
    shares = []
    for items, count in zip(made.lists, programs, strict=True):
        load = [0] * processors
        for number in range(len(items) * kv_heads):
            turn, place = divmod(number, count)
            program = place if turn % 2 == 0 else count - 1 - place
            item = items[number // kv_heads]
            load[program % processors] += max(min(item.end, item.position + item.tokens) - item.begin, 0)
        shares.append(load)
    busiest = sum(max(load) for load in shares)  # one launch after another
    return sum(map(sum, shares)) / (processors * busiest)


def measure(batch: list[tuple[int, int]], rules: tuple[Rule, Rule, Rule], arguments: argparse.Namespace) -> list[str]:
    """Return a row of the table."""
    queries, contexts = [query for query, _ in batch], [context for _, context in batch]
    fixed = arguments.deterministic
    made = schedule(queries, contexts, rules, window=None, room=arguments.partials, fixed=fixed)
    programs = [max(1, rule.fill * arguments.kv_heads) for rule in rules]
    share = busy_share(made, kv_heads=arguments.kv_heads, programs=programs, processors=arguments.processors)
    return [str(sum(map(len, made.lists)) * arguments.kv_heads), str(len(made.joins)), f"{share:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processors", type=int, default=132, help="multiprocessors (default: %(default)s, an H200)")
    parser.add_argument("--target", default="sm_90", help="the GPU's architecture (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head (default: %(default)s)")
    parser.add_argument("--partials", type=int, default=4032, help="the room of the workspace (default: %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="splits of 512 tokens, as with --deterministic")
    arguments = parser.parse_args()
    from quire_kernels.paged_attention.tiles import schedule_rules
    from quire_kernels.triton_runtime.target import Target

    rules = schedule_rules(
        kv_heads=arguments.kv_heads,
        group=arguments.group,
        split_tokens=512 if arguments.deterministic else None,
        target=Target.named(arguments.target),
        processors=arguments.processors,
    )
    rows = [[name, *measure(batch, rules, arguments)] for name, batch in CASES.items()]
    columns = ["batch", "items x KV heads", "tokens to join", "multiprocessors busy"]
    show_table("The schedule of a layer's attention", columns, rows, [f"rules: {rule}" for rule in rules])


if __name__ == "__main__":
    main()
