#!/usr/bin/env python3
"""Measure what grammars cost: decode steps whose sequences all follow one, against steps without.

    python -m benchmarks.serving.constrained [--model DIR] [--sequences 32] [--rounds 5] [--steps 60] [--json FILE]

Rounds of both kinds alternate; figures are medians. All sequences write lines of JSON by one schema until the round
ends. ``apply`` is the thread's CPU time to set the masked logits of a step, measured alone.
"""

import json
import os
import statistics
from argparse import Namespace
from pathlib import Path
from time import thread_time

from benchmarks.report import DEMO_MODEL, at_least_one, machine, parser, progress, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench, time_steps
from quire_engine.core.batch import ConstrainedSequences
from quire_engine.engine import Engine
from quire_engine.grammar.compiler import compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarSpec, Vocabulary
from quire_engine.ipc.process import compute_environment
from quire_engine.text.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_CONTEXT = 64
_WARM_UP_STEPS = 5


def grammar_of_lines(vocabulary: Vocabulary) -> str:
    """Return a grammar of lines of JSON, which always lets the answer go on."""
    text = f'start: line+\nline: %json {json.dumps(SCHEMA)} "\\n"\n'
    spec = GrammarSpec(kind="grammar", text=text, param="benchmark")
    return compile_grammar(spec, vocabulary, make_tokenizer(vocabulary))


def apply_seconds(engine: Engine, vocab_size: int, sequences: int, repeats: int = 20) -> float:
    """Return the CPU time to apply the masks that the engine's sequences have now."""
    import torch

    from quire_engine.runner.token_masks import apply_masks

    assert engine.matchers is not None
    constrained = ConstrainedSequences(places=list(range(sequences)), keys=list(range(sequences)))
    masks = engine.matchers.masks(constrained).tokens()
    assert masks is not None, "no sequence is constrained"
    logits = torch.zeros(sequences, vocab_size)
    times = []
    for _ in range(repeats):
        began = thread_time()
        apply_masks(logits, masks)
        times.append(thread_time() - began)
    return statistics.median(times)


def measure(arguments: Namespace) -> dict[str, object]:
    """Return the row of the benchmark."""
    bench = Bench(arguments.model, threads=arguments.threads)
    vocabulary = load_tokenizer(arguments.model).vocabulary(bench.model.vocab_size, bench.model.eos_token_ids)
    if vocabulary is None:
        raise SystemExit(f"{arguments.model}: the tokenizer of this model cannot be constrained by a grammar")
    grammar = grammar_of_lines(vocabulary)
    steps: dict[str, list[float]] = {"free": [], "constrained": []}
    applied: list[float] = []
    with progress() as shown:
        task = shown.add_task("rounds", total=2 * arguments.rounds)
        for _ in range(arguments.rounds):
            for kind in steps:
                wanted = grammar if kind == "constrained" else None
                count = _WARM_UP_STEPS + arguments.steps + 1
                engine = bench.decoding(arguments.sequences, _CONTEXT, count, grammar=wanted, vocabulary=vocabulary)
                time_steps(engine, _WARM_UP_STEPS)
                steps[kind] += [step.wall_seconds for step in time_steps(engine, arguments.steps)]
                if wanted is not None:
                    applied.append(apply_seconds(engine, bench.model.vocab_size, arguments.sequences))
                shown.advance(task)
    free, constrained = (statistics.median(times) for times in steps.values())
    return {
        "model": arguments.model.name,
        "vocabulary": bench.model.vocab_size,
        "sequences": arguments.sequences,
        "step_seconds": free,
        "constrained_step_seconds": constrained,
        "throughput": free / constrained,
        "apply_seconds": statistics.median(applied),
        "apply_seconds_per_sequence": statistics.median(applied) / arguments.sequences,
    }


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__, plot=False)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the demo model")
    options.add_argument("--sequences", type=at_least_one, default=32, help="default: 32")
    options.add_argument("--rounds", type=at_least_one, default=5, help="default: 5")
    options.add_argument("--steps", type=at_least_one, default=60, help="steps of a round; default: 60")
    options.add_argument("--threads", type=at_least_one, default=len(usable_cpus()), help="default: all CPUs")
    arguments = options.parse_args()
    os.environ.update(compute_environment(arguments.threads, os.environ))
    row = measure(arguments)
    cells = (
        str(row["sequences"]),
        f"{row['step_seconds'] * 1e3:.2f} ms",  # type: ignore[operator]
        f"{row['constrained_step_seconds'] * 1e3:.2f} ms",  # type: ignore[operator]
        f"{row['throughput']:.2f}",
        f"{row['apply_seconds'] * 1e6:.0f} µs",  # type: ignore[operator]
    )
    columns = ("sequences", "step", "step, constrained", "throughput", "applying masks")
    show_table(f"{row['model']}, vocabulary {row['vocabulary']}", columns, [cells], [machine()])
    save(arguments.json, [row])


if __name__ == "__main__":
    main()
