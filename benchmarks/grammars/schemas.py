"""JSON schemas in files, with instances where a collection has them.

Three shapes are read: MaskBench (an object with ``schema`` and ``tests``), the JSON-Schema-Test-Suite (an array of such
objects), and a schema alone. A file that is no JSON is skipped and counted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance

from quire_engine.grammar.compiler import LIMITS, compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarError, GrammarSpec, Vocabulary

EOS = 256
BYTES = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b""], special_tokens={"<|end|>": EOS}, eos_token_ids=(EOS,)
)
"""A vocabulary with one token per byte, for judgements that do not depend on tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A value, and whether the collection says that it is valid."""

    value: Any
    valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaCase:
    """A schema with its instances."""

    name: str
    group: str
    """The collection: the folder, or what the name of the file says."""
    schema: Any
    instances: list[Instance] = field(default_factory=list)


def read_schemas(folder: Path) -> Iterator[SchemaCase]:
    """Yield the schemas of all JSON files below a folder, in the order of their paths. Raises OSError."""
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        group = path.stem.partition("---")[0] if "---" in path.stem else path.parent.name
        cases = content if isinstance(content, list) else [content]
        for number, case in enumerate(cases):
            name = path.stem if len(cases) == 1 else f"{path.stem}#{number}"
            if isinstance(case, dict) and "schema" in case and isinstance(case.get("tests"), list):
                instances = [Instance(value=each["data"], valid=each["valid"]) for each in case["tests"]]
                yield SchemaCase(name=name, group=group, schema=case["schema"], instances=instances)
            elif isinstance(case, dict):
                yield SchemaCase(name=name, group=group, schema=case)


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


__all__ = ["BYTES", "EOS", "GrammarError", "Grammars", "Instance", "SchemaCase", "read_schemas"]
