"""The declaration of the resource's fields: schema, reading and engine flags of a field follow from one line.

A section of the resource is a dataclass. Each of its fields has a kind and the default of the resource; its name in
YAML is the attribute's, without a unit and in camel case::

    max_sequences: int = Integer("Maximum number of sequences.", minimum=1, flags=("max-num-seqs",)).default(256)

``section_schema`` returns the OpenAPI schema of a section for the CRD (``make generate``), ``read_section`` reads one
from a document, and ``flag_owners`` lists the engine flags that its fields set. A ``Rule`` over several fields is one
condition with one message for the API server and for the parser.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

from quire_operator.api.fields import Fields, Problem

JSON = dict[str, Any]
S = TypeVar("S")
_KIND = "kind"


@runtime_checkable
class Checked(Protocol):
    """A section with checks that CEL cannot express or whose messages need figures."""

    def check(self, document: Fields) -> None:
        """Note problems in the section's document; called only if each of its fields is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition over one field, or over several fields of a section."""

    message: str
    cel: str = ""
    """The condition for the API server; empty: CEL cannot express it."""
    holds: Callable[[Any, Fields], bool] | None = None
    """The condition for the parser, given the section as value and as document; None: only the API server checks it."""
    at: str = ""
    """The field that the message is about; empty: the section."""

    @property
    def schema(self) -> JSON:
        return {"rule": self.cel, **({"fieldPath": f".{self.at}"} if self.at else {}), "message": self.message}

    @property
    def reads(self) -> set[str]:
        """The fields that the condition depends on."""
        return {self.at, *re.findall(r"\bself\.(\w+)", self.cel)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of a field: its description in the CRD, its parsing, and its engine flags."""

    unit: ClassVar[str] = ""
    """The suffix of an attribute that its name in YAML does not have."""

    description: str = field(kw_only=False)
    flags: tuple[str, ...] = ()
    """Flags of the engine that the field sets and that extraArgs may not set; the first one gets the value."""
    is_default_stored: bool = True
    """False: the API server does not write the default into objects, so that rules see what a person wrote."""
    rules: tuple[Rule, ...] = ()
    name: str = ""
    """In YAML, if it does not follow from the attribute."""
    example: str = ""
    """The accepted form, for the message that a required field is missing."""

    def default(self, value: Any) -> Any:
        """Return the dataclass field of this kind with a default."""
        if isinstance(value, dict):
            return field(default_factory=value.copy, metadata={_KIND: self})
        return field(default=value, metadata={_KIND: self})

    def required(self) -> Any:
        """Return the dataclass field of this kind without a default."""
        return field(metadata={_KIND: self})

    @property
    def placeholder(self) -> Any:
        """The value that stands for a required one that is missing or wrong, so that reading continues."""
        return None

    def schema(self, value_type: Any) -> JSON:
        """Return the schema without description, default and ``rules``."""
        raise NotImplementedError

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        """Return the value of the field ``name`` of a document; problems are noted there."""
        raise NotImplementedError

    def in_yaml(self, value: Any) -> Any:
        return value

    def arguments(self, value: Any) -> list[str]:
        """Return the engine arguments for ``value``; None leaves it to the engine."""
        return [] if value is None or not self.flags else [f"--{self.flags[0]}", str(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A field of a section, as its class declares it."""

    attribute: str
    name: str
    kind: Kind
    type: Any
    """The type of its values without None, or of the items of a tuple."""
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def schema(self) -> JSON:
        schema = {"description": self.kind.description, **self.kind.schema(self.type)}
        if self.kind.rules:
            schema["x-kubernetes-validations"] = [rule.schema for rule in self.kind.rules]
        if self.kind.is_default_stored and self.default not in (MISSING, None, "", (), {}):
            schema["default"] = self.kind.in_yaml(self.default)
        return schema

    def read(self, document: Fields) -> Any:
        """Return the value in a document or the default; problems are noted there."""
        if not self.is_required:
            return self.kind.read(document, self.name, self.type, self.default)
        if not document.has(self.name) and not isinstance(self.kind, Section):  # its own fields say what is required
            document.problem(self.name, f"is required: {self.kind.example}" if self.kind.example else "is required")
        return self.kind.read(document, self.name, self.type, self.kind.placeholder)


@cache
def declared(section: type) -> tuple[Declared, ...]:
    """Return the declared fields of a section in their order; others, such as the name of an object, are left out."""
    hints = get_type_hints(section)
    found: list[Declared] = []
    for member in fields(section):
        kind = member.metadata.get(_KIND)
        if kind is not None:
            hint = hints[member.name]
            value_type = next((part for part in get_args(hint) if part is not type(None)), hint)
            first, *others = member.name.removesuffix(kind.unit).split("_")
            name = kind.name or first + "".join(word.capitalize() for word in others)
            default = member.default if member.default_factory is MISSING else member.default_factory()
            found.append(Declared(attribute=member.name, name=name, kind=kind, type=value_type, default=default))
    return tuple(found)


def section_rules(section: type) -> tuple[Rule, ...]:
    """Return the rules over several fields of a section: its class variable ``RULES``."""
    rules: tuple[Rule, ...] = getattr(section, "RULES", ())
    return rules


def section_schema(section: type) -> JSON:
    members = declared(section)
    required = [member.name for member in members if member.is_required]
    rules = [rule.schema for rule in section_rules(section) if rule.cel]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        **({"x-kubernetes-validations": rules} if rules else {}),
        "properties": {member.name: member.schema for member in members},
    }


def read_section(section: type[S], document: Fields, **others: Any) -> S:
    """Return a section read from a document; ``others`` are the fields that are not declared.

    A rule is not checked while a field that it reads is wrong: its message would be about the default.
    """
    values: dict[str, Any] = {}
    wrong: set[str] = set()
    described: type = section  # mypy does not know that type[S] is hashable
    for member in declared(described):
        before = len(document.problems)
        values[member.attribute] = member.read(document)
        if len(document.problems) > before:
            wrong.add(member.name)
    value = section(**others, **values)
    for rule in section_rules(section):
        if rule.holds is not None and not rule.reads & wrong and not rule.holds(value, document):
            document.problem(rule.at, rule.message)
    if not wrong and isinstance(value, Checked):
        value.check(document)
    document.done()
    return value


def flag_owners(section: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield each engine flag that a field sets, with the field's path."""
    for member in declared(section):
        where = f"{path}.{member.name}"
        yield from ((flag, where) for flag in member.kind.flags)
        if isinstance(member.kind, Section | SectionList):
            yield from flag_owners(member.type, where if isinstance(member.kind, Section) else f"{where}[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Kind):
    """A field of an earlier version, which stays in the CRD; its description begins with "Removed:".

    Otherwise the API server would drop it silently from stored objects, and clients would learn only that the field is
    unknown. An object cannot get it; one that has it already keeps it until its user deletes it, and ``trimming`` drops
    it from what the operator reads, which reports it.
    """

    type: str
    """The type that its values had: object or array."""

    @property
    def message(self) -> str:
        return f"was {self.description[0].lower()}{self.description[1:]}"

    def schema(self, value_type: Any) -> JSON:
        anything: JSON = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        array: JSON = {"type": "array", "maxItems": 64, "x-kubernetes-list-type": "atomic", "items": anything}
        shape = array if self.type == "array" else anything
        return {**shape, "x-kubernetes-validations": [Rule(cel="false", message=self.message).schema]}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        if document.has(name):
            document.problem(name, self.message)
        return default


def without_removed(
    section: type, document: Mapping[str, object], path: str
) -> tuple[Mapping[str, object], tuple[Problem, ...]]:
    """Return a section's document without removed fields, and what each message says about them."""
    kept, problems = dict(document), list[Problem]()
    for member in declared(section):
        value = kept.get(member.name)
        where = f"{path}.{member.name}"
        if isinstance(member.kind, Removed) and value is not None:
            problems.append(Problem(path=where, message=member.kind.message))
            del kept[member.name]
        elif isinstance(member.kind, Section) and isinstance(value, Mapping):
            kept[member.name], found = without_removed(member.type, value, where)
            problems += found
    return (kept, tuple(problems)) if problems else (document, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Kind):
    """A nested section; one with the default None is None unless a person sets it."""

    @property
    def placeholder(self) -> Any:
        return MISSING

    def schema(self, value_type: Any) -> JSON:
        return section_schema(value_type)

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        if default is None and not document.has(name):
            return None
        return read_section(value_type, document.section(name))

    def arguments(self, value: Any) -> list[str]:
        """Return the engine arguments of all fields of the section."""
        if value is None:
            return []
        section: Any = type(value)
        return [
            argument
            for field in declared(section)
            for argument in field.kind.arguments(getattr(value, field.attribute))
        ]

    def in_yaml(self, value: Any) -> JSON:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionList(Kind):
    """A list of sections, read as a tuple of those without problems."""

    item: str
    """The description of one of them."""
    min_items: int = 0
    max_items: int
    keys: tuple[str, ...] = ()
    """The fields by which server-side apply merges lists; without them, a list is replaced as a whole."""

    def schema(self, value_type: Any) -> JSON:
        merged: JSON = {"x-kubernetes-list-type": "atomic"}
        if self.keys:
            merged = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [*self.keys]}
        items = {"description": self.item, **section_schema(value_type)}
        least = {"minItems": self.min_items} if self.min_items else {}
        return {"type": "array", **least, "maxItems": self.max_items, **merged, "items": items}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        if not document.has(name):
            return default
        values: list[Any] = []
        for item in document.sections(name, at_least=self.min_items, at_most=self.max_items):
            before = len(document.problems)
            value = read_section(value_type, item)
            if len(document.problems) == before:
                values.append(value)
        return tuple(values)
