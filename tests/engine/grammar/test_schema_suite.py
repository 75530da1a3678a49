"""Accepted JSON schemas judge the instances of the JSON-Schema-Test-Suite as it does; refused ones name the reason.

The suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, copyright 2012 Julian Berman, MIT license) comes
from the source distribution of jsonschema, which is unpacked into the cache of the tests. The text of each instance, as
``json.dumps`` writes it, goes through a matcher byte by byte.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import llguidance
import package_sources
import pytest

from quire_engine.grammar.compiler import LIMITS, compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarError, GrammarSpec, Vocabulary

EOS = 256
VOCABULARY = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b""], special_tokens={"<|end|>": EOS}, eos_token_ids=(EOS,)
)
TOKENIZER = make_tokenizer(VOCABULARY)
ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

Place = tuple[str, str, str]
"""The file, the description of the schema, and the description of the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A schema of the suite, and how its grammar judges the instances."""

    file: str
    description: str
    schema: Any
    reason: str | None
    """The reason why the schema is refused; None for an accepted one."""
    grammar: str
    instances: list[dict[str, Any]]
    accepted: list[bool]
    """One entry for each instance; empty for a refused schema."""

    def differences(self) -> Iterator[tuple[Place, Any, bool]]:
        """Yield each instance that the suite judges otherwise: its place, itself and the suite's verdict."""
        for instance, accepted in zip(self.instances, self.accepted, strict=False):
            if accepted != instance["valid"]:
                yield (self.file, self.description, instance["description"]), instance["data"], instance["valid"]


def accepts(grammar: str, value: Any) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    text = json.dumps(value, ensure_ascii=False).encode()
    return bool(matcher.consume_tokens(list(text)) and matcher.is_accepting())


def judge(file: Path) -> Iterator[Judged]:
    for case in json.loads(file.read_bytes()):
        spec = GrammarSpec(kind="json_schema", text=json.dumps(case["schema"]), param="p")
        grammar, reason = "", None
        try:
            grammar = compile_grammar(spec, VOCABULARY, TOKENIZER)
        except GrammarError as error:
            reason = str(error)
        yield Judged(
            file=file.name,
            description=case["description"],
            schema=case["schema"],
            reason=reason,
            grammar=grammar,
            instances=case["tests"],
            accepted=[accepts(grammar, each["data"]) for each in case["tests"]] if reason is None else [],
        )


@pytest.fixture(scope="module")
def suite() -> Path:
    """Return the folder of the suite's draft 2020-12, unpacked into the cache of the tests."""
    return package_sources.source("schema-suite.lock") / "json" / "tests" / "draft2020-12"


@pytest.fixture(scope="module")
def judged(suite: Path) -> list[Judged]:
    return [each for file in sorted(suite.glob("*.json")) for each in judge(file)]


@pytest.fixture(scope="module")
def formats(suite: Path) -> list[Judged]:
    files = sorted((suite / "optional" / "format").glob("*.json"))
    return [each for file in files if file.stem in ENFORCED_FORMATS for each in judge(file)]


def reordered(value: Any) -> list[Any]:
    """Return an object with its properties in every order."""
    return [dict(order) for order in permutations(value.items())]


def integral(value: Any) -> list[Any]:
    """Return a value with integers in place of floats that are whole."""
    if isinstance(value, list):
        return [[integral(each)[0] for each in value]]
    return [int(value) if isinstance(value, float) and value.is_integer() else value]


SPELLINGS: dict[Callable[[Any], list[Any]], set[Place]] = {
    # The writer chooses the order of properties; a grammar has them in the order of the schema.
    reordered: {
        ("allOf.json", "allOf", "allOf"),
        ("allOf.json", "allOf with base schema", "valid"),
        ("const.json", "const with object", "same object with different property order is valid"),
    },
    # 1.0 is an integer as well; a grammar has integers, and integers of const and enum, without a fraction.
    integral: {
        ("const.json", "const with 0 does not match other zero-like types", "float zero is valid"),
        ("const.json", "const with 1 does not match true", "float one is valid"),
        ("const.json", "const with -2.0 matches integer and float types", "float -2.0 is valid"),
        ("const.json", "float and integers are equal up to 64-bit representation limits", "float is valid"),
        ("enum.json", "enum with 0 does not match false", "float zero is valid"),
        ("enum.json", "enum with [0] does not match [false]", "[0.0] is valid"),
        ("enum.json", "enum with 1 does not match true", "float one is valid"),
        ("enum.json", "enum with [1] does not match [true]", "[1.0] is valid"),
        ("type.json", "integer type matches integers", "a float with zero fractional part is an integer"),
    },
}
"""Valid instances that are refused as they are written, by how the same value must be written to be accepted."""


def test_schemas_judge_instances_as_the_suite_does(judged: list[Judged]) -> None:
    """Leave out format.json, whose formats are annotations: another test covers it."""
    found = {place: valid for each in judged if each.file != "format.json" for place, _, valid in each.differences()}
    assert found == dict.fromkeys((place for places in SPELLINGS.values() for place in places), True)


@pytest.mark.parametrize("respelled", SPELLINGS, ids=lambda each: each.__name__)
def test_a_value_is_accepted_in_another_spelling(judged: list[Judged], respelled: Callable[[Any], list[Any]]) -> None:
    differences = {place: (each.grammar, data) for each in judged for place, data, _ in each.differences()}
    refused = {
        place
        for place in SPELLINGS[respelled]
        if not any(accepts(differences[place][0], value) for value in respelled(differences[place][1]))
    }
    assert refused == set()


def test_formats_are_enforced_and_no_annotations(judged: list[Judged]) -> None:
    """Expect that exactly the invalid strings of the formats that llguidance knows are refused."""
    found = {each.schema["format"] for each in judged if each.file == "format.json" and list(each.differences())}
    verdicts = {valid for each in judged if each.file == "format.json" for _, _, valid in each.differences()}
    assert found == ENFORCED_FORMATS and verdicts == {True}


def test_no_invalid_instance_is_accepted(judged: list[Judged]) -> None:
    assert [place for each in judged for place, _, valid in each.differences() if not valid] == []


def test_suite_results_do_not_regress(judged: list[Judged]) -> None:
    accepted = [each for each in judged if each.reason is None]
    right = sum(len(each.accepted) - len(list(each.differences())) for each in accepted)
    assert len(judged) == 368 and len(accepted) >= 202 and right >= 700


def named_keywords(reason: str) -> set[str] | None:
    """Return the keywords that a refusal names; None where it names none."""
    found = re.match(r'the keyword "(\S+)" is not supported|(\w+): ', reason)
    return None if found is None else {found[1] or found[2]}


def kind_of(each: Judged) -> str:
    """Return what a refusal names, after checking that the schema has it."""
    assert each.reason is not None
    keywords = named_keywords(each.reason)
    if keywords and keywords <= set(keys_of(each.schema)):
        return "keyword"
    document = re.match(r"\$(?:ref|schema): '([^']+)' is not", each.reason)
    if document is not None and document[1] in json.dumps(each.schema):
        return "other document"
    if each.reason == "it allows no value" and not any(instance["valid"] for instance in each.instances):
        return "no valid instance"
    return each.reason


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


def test_a_refused_schema_names_its_reason(judged: list[Judged]) -> None:
    kinds = Counter(kind_of(each) for each in judged if each.reason is not None)
    assert kinds == {
        "keyword": 136,
        "other document": 24,
        "no valid instance": 6,
    }


INEXACT = {
    "date-time.json": "leap second.*offset|leap second.*UTC",
    "time.json": "leap second.*offset",
    "email.json": "quoted string|address-literal",
    "ipv6.json": "ipv4 section|mixed|long valid",
}
"""Strings that formats refuse and the suite accepts: regular expressions of the descriptions, by file."""


def test_enforced_formats_differ_only_where_named(formats: list[Judged]) -> None:
    differences = [(*place, valid) for each in formats for place, _, valid in each.differences()]
    unnamed = [
        (file, description)
        for file, _, description, valid in differences
        if not (valid and re.search(INEXACT.get(file, r"\Z."), description))
    ]
    assert unnamed == []
    assert Counter((file, valid) for file, *_, valid in differences) == {
        ("date-time.json", True): 1,
        ("email.json", True): 4,
        ("ipv6.json", True): 4,
        ("time.json", True): 4,
    }
