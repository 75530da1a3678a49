#!/usr/bin/env python3
"""Measure what one token of a constrained answer costs with a large vocabulary: following it and filling the next mask.

    python -m benchmarks.grammars.mask_cost [FOLDER] [--vocabulary 150000] [--model DIR] [--limit 300] [--json FILE]

With a FOLDER of schemas that have valid instances (see ``conformance``), each instance is written token by token, as a
model would that knows the answer. Without one, instances of a built-in schema are used. The vocabulary is a model's, or
one of N tokens that this command makes from pairs of the demo model's tokens. Times are CPU times of one thread.
"""

import json
import random
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from time import thread_time

import llguidance

from benchmarks.grammars.schemas import GrammarError, Grammars, Instance, SchemaCase, read_schemas
from benchmarks.report import DEMO_MODEL, at_least_one, machine, parser, progress, save, show_table
from quire_engine.grammar.compiler import LIMITS
from quire_engine.grammar.spec import Vocabulary
from quire_engine.text.tokenizer import load_tokenizer

MAX_TOKENS = 500
"""The most tokens of one instance that are measured."""
TYPICAL_BYTES = 8
LONG_SHARE = 0.1
"""The share of longer pairs that the synthetic vocabulary keeps."""
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def synthetic_vocabulary(size: int, seed: int = 7) -> Vocabulary:
    """Return a vocabulary of this size: the demo model's tokens, and pairs of them."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert tokenizer.eos_id is not None
    found = tokenizer.vocabulary(tokenizer.vocab_size, (tokenizer.eos_id,))
    assert found is not None
    special = set(found.special_tokens.values())
    single = [token for number, token in enumerate(found.tokens) if token and number not in special]
    generator = random.Random(seed)
    tokens, known = list(found.tokens), set(found.tokens)
    while len(tokens) < size:
        pair = generator.choice(single) + generator.choice(single)
        # Few tokens of real vocabularies are longer than this.
        if pair not in known and (len(pair) <= TYPICAL_BYTES or generator.random() < LONG_SHARE):
            known.add(pair)
            tokens.append(pair)
    return Vocabulary(tokens=tokens[:size], special_tokens=found.special_tokens, eos_token_ids=found.eos_token_ids)


class LongestMatch:
    """Cuts text into the longest tokens that fit, which needs no merges."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special_tokens.values())
        self._ids = {token: number for number, token in enumerate(vocabulary.tokens) if token and number not in special}
        self._longest = min(32, max(map(len, self._ids)))

    def encode(self, text: bytes) -> list[int]:
        """Return the token ids of a text."""
        ids, start = [], 0
        while start < len(text):
            length = next(
                size
                for size in range(min(self._longest, len(text) - start), 0, -1)
                if text[start : start + size] in self._ids
            )
            ids.append(self._ids[text[start : start + length]])
            start += length
        return ids


def built_in_cases() -> list[SchemaCase]:
    """Return the schema of a person with a few instances."""
    generator = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz "
    instances = [
        Instance(
            value={
                "name": "".join(generator.choice(letters) for _ in range(20)),
                "age": generator.randrange(100),
                "mail": "mail@example.com",
                "tags": ["red", "blue"],
                "notes": ["".join(generator.choice(letters) for _ in range(60)) for _ in range(3)],
            },
            valid=True,
        )
        for _ in range(10)
    ]
    return [SchemaCase(name="person", group="built-in", schema=_PERSON, instances=instances)]


def token_times(grammars: Grammars, grammar: str, token_ids: list[int]) -> tuple[float, list[float]]:
    """Return the seconds of the first mask, and of each further token with the mask after it."""
    began = thread_time()
    matcher = llguidance.LLMatcher(grammars.tokenizer, grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    first = thread_time() - began
    times = []
    for token_id in token_ids[:MAX_TOKENS]:
        began = thread_time()
        if not matcher.consume_token(token_id) or matcher.is_stopped():
            break
        matcher.compute_bitmask()
        times.append(thread_time() - began)
    return first, times


def measure(arguments: Namespace) -> dict[str, object]:
    """Return the row of the benchmark."""
    if arguments.model is None:
        vocabulary = synthetic_vocabulary(arguments.vocabulary)
    else:
        tokenizer = load_tokenizer(arguments.model)
        found = tokenizer.vocabulary(tokenizer.vocab_size, () if tokenizer.eos_id is None else (tokenizer.eos_id,))
        if found is None:
            raise SystemExit(f"{arguments.model}: the tokenizer of this model cannot be constrained by a grammar")
        vocabulary = found
    cut = LongestMatch(vocabulary)
    grammars = Grammars(vocabulary)
    cases = built_in_cases() if arguments.folder is None else list(read_schemas(arguments.folder))
    cases = [case for case in cases if any(instance.valid for instance in case.instances)]
    if len(cases) > arguments.limit:
        cases = random.Random(7).sample(cases, arguments.limit)
    firsts: list[float] = []
    times: list[float] = []
    with progress() as shown:
        for case in shown.track(cases):
            try:
                grammar = grammars.compile(case.schema)
            except GrammarError:
                continue
            for instance in case.instances:
                if instance.valid:
                    text = json.dumps(instance.value, ensure_ascii=False).encode()
                    first, others = token_times(grammars, grammar, cut.encode(text))
                    firsts.append(first)
                    times += others
    if not times:
        raise SystemExit("no schema was accepted")
    times.sort()
    return {
        "vocabulary": len(vocabulary.tokens),
        "schemas": len(cases),
        "answers": len(firsts),
        "tokens": len(times),
        "mean_seconds": statistics.fmean(times),
        "p50_seconds": times[len(times) // 2],
        "p99_seconds": times[int(len(times) * 0.99)],
        "max_seconds": times[-1],
        "first_mask_mean_seconds": statistics.fmean(firsts),
        "first_mask_max_seconds": max(firsts),
    }


def main() -> int:
    """Run the benchmark. Return the exit status."""
    options = parser(__doc__, plot=False)
    options.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="a folder with schemas and instances")
    options.add_argument("--vocabulary", type=at_least_one, default=150_000, metavar="N", help="default: 150000")
    options.add_argument("--model", type=Path, metavar="DIR", help="use the vocabulary of this model")
    options.add_argument("--limit", type=at_least_one, default=300, metavar="N", help="schemas; default: 300")
    arguments = options.parse_args()
    row = measure(arguments)
    names = ("mean_seconds", "p50_seconds", "p99_seconds", "max_seconds")
    cells = [str(row["vocabulary"]), str(row["tokens"]), *(f"{row[name] * 1e6:.0f} µs" for name in names)]  # type: ignore[operator]
    cells += [f"{row[name] * 1e3:.1f} ms" for name in ("first_mask_mean_seconds", "first_mask_max_seconds")]  # type: ignore[operator]
    columns = ("vocabulary", "tokens", "mean", "median", "p99", "largest", "first mask, mean", "largest")
    show_table("CPU time of a token and its mask", columns, [cells], [machine()])
    save(arguments.json, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
