"""The declaration of a field gives its schema, its value and its flag, and a rule is checked with one message."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import pytest

from quire_operator.api import Spec
from quire_operator.api.field_kinds import Boolean, ByteSize, Choice, Duration, Integer, SecretReference, Text
from quire_operator.api.fields import Fields, Problem
from quire_operator.api.schema import Rule, Section, SectionList, declared, flag_owners, read_section, section_schema


class Colour(StrEnum):
    RED = "Red"
    BLUE = "Blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    wait_seconds: float = Duration("Wait.", minimum=1.0, flags=("wait",)).default(90.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    least: int = Integer("Least.", minimum=1, maximum=9).default(2)
    most_parts: int = Integer("Most.", minimum=1).required()
    size: int = Integer("Size.", choices=(16, 32), is_default_stored=False).default(16)
    space_bytes: int | None = ByteSize("Space.", flags=("space-bytes",)).default(None)
    colour: Colour = Choice("Colour.", flags=("colour",)).default(Colour.RED)
    is_on: bool = Boolean("On.", is_default_stored=False).default(False)
    title: str | None = Text("Title.", max_length=5).default(None)
    key_secret: str | None = SecretReference("Key.", secret="Name.").default(None)
    inner: Inner = Section("Inner.").default(Inner())
    other: Inner | None = Section("Other.").default(None)
    several: tuple[Inner, ...] = SectionList("Several.", item="One.", max_items=2).default(())

    RULES: ClassVar = (
        Rule(
            at="mostParts",
            cel="self.least <= self.mostParts",
            holds=lambda outer, document: outer.least <= outer.most_parts,
            message="must be at least least",
        ),
    )

    def check(self, document: Fields) -> None:
        if self.most_parts == 8:
            document.problem("mostParts", f"8 is too many for {self.colour}")


def read(body: Mapping[str, Any]) -> tuple[Outer, list[str]]:
    problems: list[Problem] = []
    outer = read_section(Outer, Fields(body, path="spec", problems=problems))
    return outer, [str(problem) for problem in problems]


def test_names_lose_their_unit_and_become_camel_case() -> None:
    names = [field.name for field in declared(Outer)]
    assert names == [
        "least",
        "mostParts",
        "size",
        "space",
        "colour",
        "isOn",
        "title",
        "key",
        "inner",
        "other",
        "several",
    ]


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("least", {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9, "default": 2}),
        ("mostParts", {"type": "integer", "format": "int32", "minimum": 1, "maximum": 2**31 - 1}),
        ("size", {"type": "integer", "format": "int32", "enum": [16, 32]}),
        ("colour", {"type": "string", "enum": ["Red", "Blue"], "default": "Red"}),
        ("isOn", {"type": "boolean"}),
        ("title", {"type": "string", "maxLength": 5}),
    ],
)
def test_schema_follows_from_kind_type_and_default(name: str, schema: dict[str, Any]) -> None:
    description = next(field.kind.description for field in declared(Outer) if field.name == name)
    assert section_schema(Outer)["properties"][name] == {"description": description, **schema}


def test_sections_nest_with_their_defaults_and_rules() -> None:
    schema = section_schema(Outer)
    assert schema["required"] == ["mostParts"]
    assert [rule["fieldPath"] for rule in schema["x-kubernetes-validations"]] == [".mostParts"]
    inner, other = schema["properties"]["inner"], schema["properties"]["other"]
    assert (inner["default"], "default" in other) == ({}, False)
    assert inner["properties"]["wait"]["default"] == "90s"
    (rule,) = inner["properties"]["wait"]["x-kubernetes-validations"]
    assert "duration('1s')" in rule["rule"]
    assert "between 1s and 24h" in rule["message"]


def test_values_and_defaults_are_read() -> None:
    outer, problems = read({"mostParts": 3, "space": "4Ki", "key": {"secretName": "k"}, "other": {"wait": "2m"}})
    expected = Outer(most_parts=3, space_bytes=4096, key_secret="k", other=Inner(wait_seconds=120.0))
    assert (outer, problems) == (expected, [])


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "spec.mostParts: is required"),
        ({"mostParts": 1}, "spec.mostParts: must be at least least"),
        ({"mostParts": 3, "least": 10}, "spec.least: must be <= 9"),
        ({"mostParts": 3, "size": 17}, "spec.size: must be one of 16, 32"),
        ({"mostParts": 3, "space": "0"}, "spec.space: must be an amount of memory"),
        ({"mostParts": 3, "colour": "red"}, "spec.colour: must be Red or Blue"),
        ({"mostParts": 3, "isOn": "yes"}, "spec.isOn: must be true or false"),
        ({"mostParts": 3, "title": "longer"}, "spec.title: must have at most 5 characters"),
        ({"mostParts": 3, "key": {}}, "spec.key.secretName: is required"),
        ({"mostParts": 3, "inner": {"wait": "1ms"}}, "spec.inner.wait: must be >= 1s"),
        ({"mostParts": 3, "several": [{}, {"wait": "0"}]}, "spec.several[1].wait: must be >= 1s"),
        ({"mostParts": 3, "several": [{}, {}, {}]}, "spec.several: must have at most 2 entries, got 3"),
        ({"mostParts": 8}, "spec.mostParts: 8 is too many for Red"),
        ({"mostParts": 3, "inner": {"wiat": "1s"}}, "spec.inner.wiat: unknown field; did you mean wait?"),
    ],
)
def test_each_wrong_field_is_the_only_problem(body: Mapping[str, Any], path: str) -> None:
    """A rule is not checked while a field that it reads is wrong."""
    _, problems = read(body)
    assert len(problems) == 1
    assert problems[0].startswith(path)


def test_flags_belong_to_the_fields_that_declare_them() -> None:
    owners = [*flag_owners(Outer, "spec")]
    assert owners == [
        ("space-bytes", "spec.space"),
        ("colour", "spec.colour"),
        ("wait", "spec.inner.wait"),
        ("wait", "spec.other.wait"),
        ("wait", "spec.several[].wait"),
    ]
    kinds = {field.name: field.kind for field in declared(Outer)}
    assert kinds["space"].arguments(4096) == ["--space-bytes", "4096"]
    assert kinds["colour"].arguments(Colour.BLUE) == ["--colour", "blue"]
    assert kinds["space"].arguments(None) == kinds["least"].arguments(3) == []


def test_no_two_fields_of_the_resource_set_one_flag() -> None:
    flags = [flag for flag, _ in flag_owners(Spec, "spec")]
    assert len(flags) == len(set(flags)) > 15
