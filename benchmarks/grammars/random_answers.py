#!/usr/bin/env python3
"""Sample answers from random logits under JSON schemas, and check that every complete answer is valid.

    python -m benchmarks.grammars.random_answers FOLDER [--schemas 1000] [--answers 1] [--tokens 2000] [--model DIR]

No model computes the logits: they are normally distributed, and the temperature is 1. The masks are the engine's own
(``quire_engine.grammar.matchers``). An answer that reaches the limit of tokens is cut and counts as such. jsonschema_rs
judges the others. The vocabulary has a token per byte, or is the one of ``--model``; with many tokens, random strings
seldom end. The exit status is 1 if a complete answer is invalid.
"""

import json
import random
import sys
import threading
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from benchmarks.grammars.schemas import BYTES, GrammarError, Grammars, SchemaCase, read_schemas
from benchmarks.report import at_least_one, machine, parser, progress, save, show_table
from quire_engine.core.batch import ConstrainedSequences
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.grammar.matchers import Matchers
from quire_engine.grammar.spec import Vocabulary
from quire_engine.text.tokenizer import load_tokenizer

SPREAD = 2.0
"""The standard deviation of the logits."""


class RandomAnswers:
    """Answers whose tokens are sampled from random logits under the engine's masks."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._compiled = threading.Semaphore(0)
        self._matchers = Matchers(len(vocabulary.tokens), self._compiled.release)
        self._matchers.set_vocabulary(vocabulary)
        self._generator = np.random.default_rng(seed)
        self._number = 0

    def answer(self, grammar: str, max_tokens: int) -> str | None:
        """Return an answer that follows the grammar; None if it was cut. Raises RuntimeError if a mask fails."""
        self._number += 1
        key = self._number
        while not self._matchers.request(grammar):
            self._compiled.acquire()
            self._matchers.take_compiled()
        reason = self._matchers.start(key, grammar, SamplingParams(max_tokens=max_tokens, temperature=1.0))
        if reason is not None:
            raise RuntimeError(reason)
        text = bytearray()
        try:
            for _ in range(max_tokens):
                token_id = self._sample(key)
                if token_id in self._vocabulary.eos_token_ids:
                    return text.decode()
                text += self._vocabulary.tokens[token_id]
                self._matchers.follow([key], [token_id])
            return None
        finally:
            self._matchers.discard(key)

    def _sample(self, key: int) -> int:
        masks = self._matchers.masks(ConstrainedSequences(places=[0], keys=[key]))
        if masks.failed:
            raise RuntimeError(masks.failed[key])
        size = len(self._vocabulary.tokens)
        allowed = np.unpackbits(np.frombuffer(masks.bits, dtype=np.uint8), bitorder="little")[:size].nonzero()[0]
        # The largest of logits with Gumbel noise is a sample of their softmax.
        logits = self._generator.normal(scale=SPREAD, size=len(allowed)) + self._generator.gumbel(size=len(allowed))
        return int(allowed[int(logits.argmax())])


def validator(schema: Any) -> jsonschema_rs.Validator | None:
    """Return what judges the answers; None for a schema that jsonschema_rs refuses."""
    try:
        return jsonschema_rs.validator_for(schema)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def finite(text: str) -> float:
    """Return a number; the largest one in the place of infinity, which Python reads for exponents such as 1e999."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def measure(arguments: Namespace) -> dict[str, object]:
    """Return the counts."""
    cases = list(read_schemas(arguments.folder))
    random.Random(arguments.seed).shuffle(cases)
    grammars = Grammars(_vocabulary(arguments.model))
    answers = RandomAnswers(grammars.vocabulary, arguments.seed)
    counts: Counter[str] = Counter()
    invalid: list[str] = []
    failed: list[str] = []
    with progress() as shown:
        task = shown.add_task("schemas", total=arguments.schemas)
        for case in cases:
            if counts["schemas"] == arguments.schemas:
                break
            judge = validator(case.schema)
            grammar = None if judge is None else _compiled(grammars, case)
            if judge is None or grammar is None:
                counts["schemas left out"] += 1
                continue
            counts["schemas"] += 1
            shown.advance(task)
            for _ in range(arguments.answers):
                try:
                    answer = answers.answer(grammar, arguments.tokens)
                except RuntimeError as error:
                    failed.append(f"{case.name}: {error}")
                    continue
                if answer is None:
                    counts["cut"] += 1
                elif judge.is_valid(json.loads(answer, parse_float=finite)):
                    counts["valid"] += 1
                else:
                    invalid.append(f"{case.name}: {answer}")
    return {**counts, "invalid": invalid, "failed": failed}


def _vocabulary(model: Path | None) -> Vocabulary:
    if model is None:
        return BYTES
    tokenizer = load_tokenizer(model)
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    found = tokenizer.vocabulary(tokenizer.vocab_size, ends)
    if found is None:
        raise SystemExit(f"{model}: the tokenizer of this model cannot be constrained by a grammar")
    return found


def _compiled(grammars: Grammars, case: SchemaCase) -> str | None:
    try:
        return grammars.compile(case.schema)
    except GrammarError:
        return None


def main() -> int:
    """Run the benchmark. Return the exit status."""
    options = parser(__doc__, plot=False)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with JSON files")
    options.add_argument("--schemas", type=at_least_one, default=1000, metavar="N", help="default: 1000")
    options.add_argument("--answers", type=at_least_one, default=1, metavar="N", help="per schema; default: 1")
    options.add_argument("--tokens", type=at_least_one, default=2000, metavar="N", help="of an answer; default: 2000")
    options.add_argument("--model", type=Path, metavar="DIR", help="the vocabulary; default: a token per byte")
    options.add_argument("--seed", type=int, default=7, help="default: 7")
    arguments = options.parse_args()
    row = measure(arguments)
    invalid, failed = row["invalid"], row["failed"]
    assert isinstance(invalid, list) and isinstance(failed, list)
    names = ("schemas", "schemas left out", "valid", "cut")
    cells = [*(str(row.get(name, 0)) for name in names), str(len(invalid)), str(len(failed))]
    columns = (*names, "invalid", "ended by the limits")
    show_table(f"answers from random logits, schemas of {arguments.folder.name}", columns, [cells], [machine()])
    for line in [*invalid, *failed]:
        print(line)
    save(arguments.json, [row])
    return 1 if invalid else 0


if __name__ == "__main__":
    sys.exit(main())
