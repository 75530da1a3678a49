#!/usr/bin/env python3
"""Compile a collection of JSON schemas, and let the accepted ones judge the instances that the collection has.

    python -m benchmarks.serving.json_schemas FOLDER [--limit N] [--list] [--json FILE]

FOLDER has JSON files in the shape of MaskBench (JSONSchemaBench with instances), of the JSON-Schema-Test-Suite, or
schemas alone. A schema that is refused must have a reason; it is counted by the keyword that the reason names. The exit
status is 1 if an accepted schema accepts an invalid instance.
"""

import json
import random
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

import llguidance

from benchmarks.report import at_least_one, machine, parser, progress, save, show_table
from quire_engine.grammar.compiler import LIMITS, compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarError, GrammarSpec, Vocabulary

EOS = 256
BYTES = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b""], special_tokens={"<|end|>": EOS}, eos_token_ids=(EOS,)
)
"""A vocabulary with one token per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A value, and whether the collection says that it is valid."""

    value: Any
    valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaCase:
    name: str
    schema: Any
    instances: list[Instance] = field(default_factory=list)


def read_schemas(folder: Path) -> Iterator[SchemaCase]:
    """Yield the schemas of all JSON files below a folder, in the order of their paths. Raises OSError."""
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        cases = content if isinstance(content, list) else [content]
        for number, case in enumerate(cases):
            name = path.stem if len(cases) == 1 else f"{path.stem}#{number}"
            if isinstance(case, dict) and "schema" in case and isinstance(case.get("tests"), list):
                instances = [Instance(value=each["data"], valid=each["valid"]) for each in case["tests"]]
                yield SchemaCase(name=name, schema=case["schema"], instances=instances)
            elif isinstance(case, dict):
                yield SchemaCase(name=name, schema=case)


class Grammars:
    """Compiles schemas as a server does, for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary = BYTES) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = make_tokenizer(vocabulary)

    def compile(self, schema: Any) -> str:
        """Return the grammar of a schema. Raises GrammarError with the reason of a refusal."""
        spec = GrammarSpec(kind="json_schema", text=json.dumps(schema), param="schema")
        return compile_grammar(spec, self.vocabulary, self.tokenizer)

    def accepts(self, grammar: str, value: Any) -> bool:
        """Return whether the grammar accepts a value as ``json.dumps`` writes it. The vocabulary must be ``BYTES``."""
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)
        text = json.dumps(value, ensure_ascii=False).encode()
        return bool(matcher.consume_tokens(list(text)) and matcher.is_accepting())


DEADLINE_SECONDS = 0.9
"""The time after which a server refuses a grammar (``GrammarLimits.wall_seconds``)."""


@dataclass(slots=True, kw_only=True)
class Tally:
    schemas: int = 0
    accepted: int = 0
    right: int = 0
    invalid_accepted: list[str] = field(default_factory=list)
    valid_refused: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """CPU time of each compilation with its trial."""
    slow: list[str] = field(default_factory=list)
    """Schemas whose compilation takes longer than a server allows."""

    def add(self, case: SchemaCase, grammars: Grammars) -> None:
        """Compile one schema and judge its instances."""
        self.schemas += 1
        began = thread_time()
        try:
            grammar = grammars.compile(case.schema)
        except GrammarError as error:
            self.refusals[subject(str(error))] += 1
            return
        finally:
            self.seconds.append(thread_time() - began)
            if self.seconds[-1] > DEADLINE_SECONDS:
                self.slow.append(case.name)
        self.accepted += 1
        for number, instance in enumerate(case.instances):
            found = grammars.accepts(grammar, instance.value)
            if found == instance.valid:
                self.right += 1
            else:
                (self.valid_refused if instance.valid else self.invalid_accepted).append(f"{case.name} {number}")


def subject(reason: str) -> str:
    """Return the keyword that the reason of a refusal names, or the beginning of the reason."""
    if keys := re.fullmatch(r"the keyword (.*) is not supported", reason):
        return ", ".join(sorted(re.findall(r'"([^"]+)"', keys[1])))
    if found := re.match(r"(oneOf|patternProperty|allOf|anyOf|not|if)\b", reason):
        return found[1]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:60]


def measure(arguments: Namespace) -> Tally:
    cases = list(read_schemas(arguments.folder))
    if not cases:
        raise SystemExit(f"{arguments.folder}: it has no JSON files with schemas")
    if arguments.limit is not None and arguments.limit < len(cases):
        cases = random.Random(7).sample(cases, arguments.limit)
    grammars, tally = Grammars(), Tally()
    with progress() as shown:
        for case in shown.track(cases, description="schemas"):
            tally.add(case, grammars)
    return tally


def main() -> int:
    """Run the benchmark. Return the exit status."""
    options = parser(__doc__)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with JSON files")
    options.add_argument("--limit", type=at_least_one, metavar="N", help="use N schemas, chosen at random (seed 7)")
    options.add_argument("--list", action="store_true", help="list the instances that are judged wrongly")
    arguments = options.parse_args()
    total = measure(arguments)
    times = sorted(total.seconds)
    judged = ("schemas", "accepted", "instances right", "invalid accepted", "valid refused")
    columns = (*judged, "compile, mean", "p99", f"over {DEADLINE_SECONDS} s")
    counts = (total.schemas, total.accepted, total.right, len(total.invalid_accepted), len(total.valid_refused))
    mean, p99 = sum(times) / len(times), times[int(len(times) * 0.99)]
    cells = [*map(str, counts), f"{mean * 1e3:.1f} ms", f"{p99 * 1e3:.0f} ms", str(len(total.slow))]
    show_table(f"JSON schemas of {arguments.folder.name}", columns, [cells], [machine()])
    refusals = [(reason, str(count)) for reason, count in total.refusals.most_common(20)]
    show_table("refused", ("keyword or reason", "schemas"), refusals)
    if arguments.list:
        for name in total.invalid_accepted:
            print("invalid accepted:", name)
        for name in total.valid_refused:
            print("valid refused:", name)
    save(arguments.json, [asdict(total)])
    return 1 if total.invalid_accepted else 0


if __name__ == "__main__":
    sys.exit(main())
