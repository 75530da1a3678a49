"""The values that a JSON schema allows, as a union of shapes of one type each.

``allOf``, ``anyOf``, ``oneOf`` and references become such unions; what is within arrays and objects stays a list of
schemas, all of which hold, until it is written. So a recursive schema has finitely many of them. The keywords are those
of JSON Schema 2020-12, with those of earlier drafts where their names differ. A keyword that cannot be enforced is
refused by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from quire_engine.grammar.numbers import Numbers, exact, is_whole
from quire_engine.grammar.patterns import rust_pattern
from quire_engine.grammar.spec import GrammarError

_MAX_WORK = 100_000
"""The most shapes that are combined for one schema."""
_MAX_APART = 8
"""The deepest nesting at which values of two branches of ``oneOf`` are compared."""
_MAX_SIZE = 2**31
_DIALECT = re.compile(r"https?://json-schema\.org/")
_OLDER_DRAFT = re.compile(r"http://json-schema\.org/draft-0[3-7]/")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_IN_PLACE = ("$ref", "const", "enum", "allOf", "anyOf", "oneOf")
_UNSUPPORTED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = ("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "propertyNames")
_SIZES = ("minProperties", "maxProperties", "unevaluatedItems", "unevaluatedProperties")
_TYPED = frozenset(("type", *_OF_NUMBERS, *_OF_STRINGS, *_OF_ARRAYS, *_OF_OBJECTS, *_SIZES))
_WITH_ID = frozenset(
    ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""The formats of strings that llguidance knows. All others are annotations, as the specification allows."""
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_FRACTION = r"(\.[0-9]+)?"
_TIME = (
    f"([0-9]{{2}}:[0-9]{{2}}:[0-5][0-9]{_FRACTION}([zZ]|[+-][0-9]{{2}}:[0-9]{{2}})|23:59:60{_FRACTION}([zZ]|[+-]00:00))"
)
_FORMAT_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$"}
"""Patterns of what RFC 3339 requires beyond llguidance: a 29th of February has a leap year, and a leap second is
before midnight. Those with an offset from UTC are left out: a pattern would have to list each offset with its minute.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema at its place in the document; it equals itself only."""

    schema: Any
    base: str
    """The URI that its references are relative to."""


Schemas = tuple[Node, ...]
"""Schemas that all hold; none allows any value."""


@dataclass(frozen=True, slots=True)
class Word:
    """One of null, true and false."""

    text: str


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings of some lengths, which match patterns and formats, and are listed where there is a list."""

    minimum: int = 0
    maximum: int | None = None
    patterns: tuple[str, ...] = ()
    """Patterns in Rust's syntax."""
    formats: tuple[str, ...] = ()
    listed: tuple[str, ...] | None = None
    sources: tuple[str, ...] = ()
    """The patterns as the schema has them."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays of some sizes."""

    minimum: int = 0
    maximum: int | None = None
    prefix: tuple[Schemas, ...] = ()
    rest: Schemas = ()


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of some sizes."""

    properties: tuple[tuple[str, Schemas], ...] = ()
    """Properties in the order in which they are written."""
    patterns: tuple[tuple[Strings, Schemas], ...] = ()
    """The values of further properties by their names, of which no two allow the same one."""
    rest: Schemas = ()
    """The values of all other properties."""
    required: frozenset[str] = frozenset()
    minimum: int = 0
    maximum: int | None = None


Shape = Word | Numbers | Strings | Arrays | Objects
Union = tuple[Shape, ...]

ANY: Union = (Word("null"), Word("true"), Word("false"), Numbers(), Strings(), Arrays(), Objects())


class _Circular(GrammarError):
    """A schema that is needed to know what it allows."""


class Document:
    """A JSON schema, whose parts become unions of shapes.

    ``allows`` returns whether some string is allowed, which only llguidance can decide for patterns.
    """

    def __init__(self, schema: Any, allows: Callable[[Strings], bool]) -> None:
        self._allows = allows
        self._nodes: dict[tuple[int, str], Node] = {}
        self._unions: dict[Schemas, Union] = {}
        self._resources: dict[str, Node] = {}
        self._open: set[Node] = set()
        self._possible: dict[Schemas, bool] = {}
        self._work = 0
        dialect = schema.get("$schema") if isinstance(schema, dict) else None
        if isinstance(dialect, str) and not _DIALECT.match(dialect):
            raise GrammarError(f"$schema: {dialect[:200]!r} is not known")
        self._refs_alone = isinstance(dialect, str) and _OLDER_DRAFT.match(dialect) is not None
        self._index(schema, "")
        self._resources.setdefault("", self.node(schema, ""))
        self.root: Schemas = (self._root(schema),)
        self._never: Schemas = (self.node(False, ""),)

    def _root(self, schema: Any) -> Node:
        return self.node(schema, _base(schema, ""))

    def node(self, schema: Any, base: str) -> Node:
        """Return the node of a schema, always the same one."""
        return self._nodes.setdefault((id(schema), base), Node(schema, base))

    def _index(self, schema: Any, base: str) -> None:
        """Find the parts of the document that have a URI of their own."""
        if not isinstance(schema, dict):
            return
        here = _base(schema, base)
        if here != base:
            self._resources[here] = self.node(schema, here)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(name), str):
                self._resources[f"{here}#{schema[name]}"] = self.node(schema, here)
        for name, value in schema.items():
            if name in _LISTS and isinstance(value, list):
                for each in value:
                    self._index(each, here)
            elif name in _MAPS and isinstance(value, dict):
                for each in value.values():
                    self._index(each, here)
            elif name in _WITH_ID:
                self._index(value, here)

    def union(self, schemas: Schemas) -> Union:
        """Return the shapes of the values that all schemas allow. Raises GrammarError."""
        if schemas not in self._unions:
            found = ANY
            for node in schemas:
                found = self._both(found, self._of(node))
            self._unions[schemas] = found
        return self._unions[schemas]

    def _of(self, node: Node) -> Union:
        schema = node.schema
        if isinstance(schema, bool):
            return ANY if schema else ()
        if not isinstance(schema, dict):
            raise GrammarError(f"a schema should be an object or a boolean, not {_shown(schema)}")
        if node in self._open:
            raise _Circular("a schema refers to itself, without an array or an object between")
        known = self._unions.get((node,))
        if known is not None:
            return known
        self._open.add(node)
        try:
            found = self._read(schema, _base(schema, node.base))
        finally:
            self._open.discard(node)
        self._unions[(node,)] = found
        return found

    def _read(self, schema: dict[str, Any], base: str) -> Union:
        if "$ref" in schema and self._refs_alone:
            return self._in_place("$ref", schema["$ref"], base)
        schema = {name: value for name, value in schema.items() if not _has_no_effect(name, schema)}
        for name in _UNSUPPORTED:
            if name in schema:
                refuse_keyword(name)
        found = ANY
        typed = {name: value for name, value in schema.items() if name in _TYPED}
        place = "properties" if "properties" in typed else next(iter(typed), None)
        for name, value in schema.items():
            if name in _IN_PLACE:
                found = self._both(found, self._in_place(name, value, base))
            elif name == place:
                found = self._both(found, self._typed(typed, base))
        return found

    def _in_place(self, name: str, value: Any, base: str) -> Union:
        if name == "const":
            return (self._constant(value, base),)
        if name == "$ref":
            return self.union((self._resolved(value, base),))
        if not isinstance(value, list):
            raise GrammarError(f"{name}: should be an array")
        if not value:
            raise GrammarError(f"{name}: is empty")
        if name == "enum":
            return _distinct(self._constant(each, base) for each in value)
        nodes = [self.node(each, base) for each in value]
        if name == "allOf":
            return self.union(tuple(nodes))
        unions = [self.union((node,)) for node in nodes]
        if name == "oneOf" and not self._exclusive(unions):
            raise GrammarError(
                'the keyword "oneOf" is not supported where its branches are not known to exclude one another'
            )
        return _distinct(shape for union in unions for shape in union)

    def _resolved(self, reference: Any, base: str) -> Node:
        if not isinstance(reference, str):
            raise GrammarError("$ref: should be a string")
        document, fragment = urldefrag(base if reference.startswith("#") else urljoin(base, reference))
        if reference.startswith("#"):
            fragment = reference[1:]
        if fragment and not fragment.startswith("/"):
            found = self._resources.get(f"{document}#{unquote(fragment)}")
        else:
            found = self._resources.get(document)
            for step in fragment.split("/")[1:]:
                found = (
                    None if found is None else self._child(found, unquote(step).replace("~1", "/").replace("~0", "~"))
                )
        if found is None:
            raise GrammarError(f"$ref: {reference[:200]!r} is not in the schema")
        return found

    def _child(self, node: Node, step: str) -> Node | None:
        value, base = node.schema, _base(node.schema, node.base)
        if isinstance(value, dict) and step in value:
            return self.node(value[step], base)
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            return self.node(value[int(step)], base)
        return None

    def _constant(self, value: Any, base: str) -> Shape:
        match value:
            case None:
                return Word("null")
            case bool():
                return Word("true" if value else "false")
            case str():
                return Strings(listed=(value,))
            case list():
                items = tuple((self.node({"const": each}, base),) for each in value)
                return Arrays(minimum=len(items), maximum=len(items), prefix=items, rest=self._never)
            case dict():
                properties = tuple((key, (self.node({"const": each}, base),)) for key, each in value.items())
                return Objects(properties=properties, rest=self._never, required=frozenset(value))
        number = exact(value, "const")
        return Numbers(low=number, high=number, multiple=Fraction(1) if is_whole(number) else None)

    def _typed(self, schema: Mapping[str, Any], base: str) -> Union:
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list | tuple):
            raise GrammarError("type: should be a string or an array of strings")
        found: list[Shape] = []
        for name in types:
            match name:
                case "null":
                    found.append(Word("null"))
                case "boolean":
                    found += [Word("true"), Word("false")]
                case "number" | "integer":
                    found.append(_numbers(schema, is_integer=name == "integer"))
                case "string":
                    found.append(_strings(schema))
                case "array":
                    found.append(self._arrays(schema, base))
                case "object":
                    found.append(self._objects(schema, base))
                case _:
                    raise GrammarError(f"type: {_shown(name)} is no type")
        return _distinct(found)

    def _schemas(self, schema: Any, base: str) -> Schemas:
        """Return one schema as those that all hold."""
        return () if schema is True or schema == {} else (self.node(schema, base),)

    def _arrays(self, schema: Mapping[str, Any], base: str) -> Arrays:
        maximum = _size(schema, "maxItems")
        if schema.get("uniqueItems", False) is not False and (maximum is None or maximum > 1):
            refuse_keyword("uniqueItems")
        for name in ("contains", "unevaluatedItems"):
            if name in schema:
                refuse_keyword(name)
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            prefix, rest = rest, schema.get("additionalItems", True)
        if not isinstance(prefix, list):
            raise GrammarError("prefixItems: should be an array")
        return Arrays(
            minimum=_size(schema, "minItems") or 0,
            maximum=maximum,
            prefix=tuple(self._schemas(each, base) for each in prefix),
            rest=self._schemas(rest, base),
        )

    def _objects(self, schema: Mapping[str, Any], base: str) -> Objects:
        if "unevaluatedProperties" in schema:
            refuse_keyword("unevaluatedProperties")
        properties = {name: self._schemas(each, base) for name, each in _entries(schema, "properties").items()}
        entries = _entries(schema, "patternProperties").items()
        patterns = [
            (matching, self._schemas(each, base))
            for source, each in entries
            if self._some(matching := Strings(patterns=(rust_pattern(source),), sources=(source,)))
        ]
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError("required: should be an array of strings")
        rest = self._schemas(schema.get("additionalProperties", True), base)
        names = dict.fromkeys([*properties, *required])
        found = Objects(
            properties=tuple((name, self._property(name, properties.get(name), patterns, rest)) for name in names),
            patterns=self._disjoint(patterns),
            rest=rest,
            required=frozenset(required),
            minimum=_size(schema, "minProperties") or 0,
            maximum=_size(schema, "maxProperties"),
        )
        named = self._schemas(schema.get("propertyNames", True), base)
        return self._named(found, named) if named else found

    def _property(
        self, name: str, declared: Schemas | None, patterns: Sequence[tuple[Strings, Schemas]], rest: Schemas
    ) -> Schemas:
        """Return the schemas of a property: its own ones and those of the patterns, or else those of the others."""
        matching = [schemas for names, schemas in patterns if self.has_name(names, name)]
        if declared is None and not matching:
            return rest
        return _all(declared or (), *matching)

    def has_name(self, names: Strings, name: str) -> bool:
        """Return whether a name is among others."""
        return bool(self._both((names,), (Strings(listed=(name,)),)))

    def _disjoint(self, patterns: Sequence[tuple[Strings, Schemas]]) -> tuple[tuple[Strings, Schemas], ...]:
        """Return patterns with their values. Raises GrammarError for two that one name can match."""
        for number, (one, _) in enumerate(patterns):
            for other, _ in patterns[number + 1 :]:
                if self._both((one,), (other,)):
                    shown = " and ".join(
                        repr(each.sources[0][:100]) if each.sources else "names" for each in (one, other)
                    )
                    raise GrammarError(f"patternProperties: one name can match {shown}, which is not supported")
        return tuple(patterns)

    def _named(self, objects: Objects, schemas: Schemas) -> Objects:
        """Return the objects whose names are strings that the schemas allow."""
        names = [shape for shape in self.union(schemas) if isinstance(shape, Strings)]
        if Strings() in names:
            return objects
        own = {
            name: value if any(self.has_name(each, name) for each in names) else self._never
            for name, value in objects.properties
        }
        patterns: list[tuple[Strings, Schemas]] = []
        for each in names:
            if each.listed is not None:
                listed = [name for name in each.listed if name not in own and self.has_name(each, name)]
                own |= {name: self._property(name, None, objects.patterns, objects.rest) for name in listed}
                continue
            for pattern, value in objects.patterns:
                patterns += [(both, value) for both in self._both((pattern,), (each,)) if isinstance(both, Strings)]
            if objects.patterns and objects.rest != self._never:
                raise GrammarError('the keyword "propertyNames" is not supported beside patternProperties')
            if not objects.patterns:
                patterns.append((each, objects.rest))
        return replace(objects, properties=tuple(own.items()), patterns=self._disjoint(patterns), rest=self._never)

    def _both(self, one: Union, other: Union) -> Union:
        """Return the values that both unions allow."""
        if one is ANY or other is ANY:
            return other if one is ANY else one
        self._work += len(one) * len(other)
        if self._work > _MAX_WORK:
            raise GrammarError("it is too complex: its allOf, anyOf and oneOf have too many combinations")
        found = (self._meet(first, second) for first in one for second in other if type(first) is type(second))
        return _distinct(shape for shape in found if shape is not None)

    def _meet(self, one: Any, other: Any) -> Shape | None:
        match one:
            case Word():
                return one if one == other else None
            case Numbers():
                numbers = one & other
                return None if numbers.is_empty() else numbers
            case Strings():
                return self._strings_of_both(one, other)
            case Arrays():
                return _arrays_of_both(one, other)
        assert isinstance(one, Objects)
        return self._objects_of_both(one, other)

    def _strings_of_both(self, one: Strings, other: Strings) -> Strings | None:
        listed = one.listed if other.listed is None else other.listed
        if one.listed is not None and other.listed is not None:
            listed = tuple(text for text in one.listed if text in other.listed)
        minimum, maximum = max(one.minimum, other.minimum), _least(one.maximum, other.maximum)
        if listed is not None:
            listed = tuple(
                text for text in listed if minimum <= len(text) and (maximum is None or len(text) <= maximum)
            )
            minimum, maximum = 0, None
        both = Strings(
            minimum=minimum,
            maximum=maximum,
            patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
            formats=tuple(dict.fromkeys((*one.formats, *other.formats))),
            listed=listed,
            sources=tuple(dict.fromkeys((*one.sources, *other.sources))),
        )
        if both.listed is not None and (both.patterns or both.formats):
            kept = tuple(text for text in both.listed if self._allows(replace(both, listed=(text,))))
            both = Strings(listed=kept)
        return both if self._some(both) else None

    def _some(self, strings: Strings) -> bool:
        """Return whether there is such a string."""
        if strings.listed == () or (strings.maximum is not None and strings.minimum > strings.maximum):
            return False
        return not (strings.patterns or strings.formats) or self._allows(strings)

    def _objects_of_both(self, one: Objects, other: Objects) -> Objects | None:
        names = dict.fromkeys(name for objects in (one, other) for name, _ in objects.properties)
        declared = [dict(objects.properties) for objects in (one, other)]
        properties = []
        for name in names:
            parts = [
                own[name] if name in own else self._property(name, None, objects.patterns, objects.rest)
                for own, objects in zip(declared, (one, other), strict=True)
            ]
            properties.append((name, _all(*parts)))
        return Objects(
            properties=tuple(properties),
            patterns=self._patterns_of_both(one, other),
            rest=_all(one.rest, other.rest),
            required=one.required | other.required,
            minimum=max(one.minimum, other.minimum),
            maximum=_least(one.maximum, other.maximum),
        )

    def _patterns_of_both(self, one: Objects, other: Objects) -> tuple[tuple[Strings, Schemas], ...]:
        ours, theirs = dict(one.patterns), dict(other.patterns)
        found = [(names, _all(value, theirs.get(names, other.rest))) for names, value in ours.items()]
        found += [(names, _all(value, one.rest)) for names, value in theirs.items() if names not in ours]
        return self._disjoint(found)

    def _exclusive(self, unions: Sequence[Union]) -> bool:
        """Return whether no value is known to be in two unions."""
        return all(self._apart(one, other, 0) for number, one in enumerate(unions) for other in unions[number + 1 :])

    def _apart(self, one: Union, other: Union, depth: int) -> bool:
        if one is ANY or other is ANY:
            return not one or not other
        self._work += len(one) * len(other)
        if self._work > _MAX_WORK:
            return False
        return all(
            self._shapes_apart(first, second, depth) for first in one for second in other if type(first) is type(second)
        )

    def _shapes_apart(self, one: Shape, other: Shape, depth: int) -> bool:
        if isinstance(one, Arrays) and isinstance(other, Arrays):
            return self._arrays_apart(one, other, depth)
        if isinstance(one, Objects) and isinstance(other, Objects):
            return self._objects_apart(one, other, depth)
        return self._meet(one, other) is None

    def _arrays_apart(self, one: Arrays, other: Arrays, depth: int) -> bool:
        maximum = _least(one.maximum, other.maximum)
        least = max(one.minimum, other.minimum)
        if maximum is not None and least > maximum:
            return True
        places = min(least, max(len(one.prefix), len(other.prefix)) + 1)
        return any(self._schemas_apart(_item(one, place), _item(other, place), depth) for place in range(places))

    def _objects_apart(self, one: Objects, other: Objects, depth: int) -> bool:
        maximum = _least(one.maximum, other.maximum)
        if maximum is not None and max(one.minimum, other.minimum) > maximum:
            return True
        declared = [dict(objects.properties) for objects in (one, other)]
        for name in sorted(one.required | other.required):
            parts = [
                own[name] if name in own else self._property(name, None, objects.patterns, objects.rest)
                for own, objects in zip(declared, (one, other), strict=True)
            ]
            if self._schemas_apart(parts[0], parts[1], depth):
                return True
        return False

    def _schemas_apart(self, one: Schemas, other: Schemas, depth: int) -> bool:
        if depth > _MAX_APART:
            return False
        try:
            return self._apart(self.union(one), self.union(other), depth + 1)
        except _Circular:
            return False

    def possible(self, schemas: Schemas) -> bool:
        """Return whether some finite value is allowed."""
        return self._is_possible(schemas, frozenset())

    def is_possible(self, shape: Shape) -> bool:
        """Return the same for the values of one shape."""
        return self._is_some(shape, frozenset())

    def _is_possible(self, schemas: Schemas, within: frozenset[Schemas]) -> bool:
        """Return the same without values in which a value of the schemas ``within`` is nested."""
        known = self._possible.get(schemas)
        if known is not None:
            return known
        if schemas in within:
            return False
        self._work += 1
        if self._work > _MAX_WORK:
            raise GrammarError("it is too complex: it has too many schemas")
        inner = within | {schemas}
        found = any(self._is_some(shape, inner) for shape in self.union(schemas))
        if found or not within:
            self._possible[schemas] = found
        return found

    def _is_some(self, shape: Shape, within: frozenset[Schemas]) -> bool:
        match shape:
            case Word():
                return True
            case Numbers():
                return not shape.is_empty()
            case Strings():
                return self._some(shape)
            case Arrays():
                if shape.maximum is not None and shape.minimum > shape.maximum:
                    return False
                places = range(min(shape.minimum, len(shape.prefix) + 1))
                return all(self._is_possible(_item(shape, place), within) for place in places)
        if shape.maximum is not None and max(shape.minimum, len(shape.required)) > shape.maximum:
            return False
        properties = dict(shape.properties)
        if not all(self._is_possible(properties[name], within) for name in sorted(shape.required)):
            return False
        if len(shape.required) >= shape.minimum:
            return True
        optional = sum(self._is_possible(value, within) for _, value in shape.properties)
        others = (shape.rest, *(value for _, value in shape.patterns))
        return optional >= shape.minimum or any(self._is_possible(value, within) for value in others)


def _has_no_effect(name: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword with this value allows all values where it is."""
    value = schema[name]
    match name:
        case "if":
            return "then" not in schema and "else" not in schema
        case "uniqueItems":
            return value is False
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or bool(value == {})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "minContains" | "maxContains":
            return True  # ``contains`` decides
        case "contains":
            return bool(schema.get("minContains") == 0) and "maxContains" not in schema
    return False


def refuse_keyword(name: str) -> NoReturn:
    """Raise the GrammarError of a keyword that cannot be enforced."""
    raise GrammarError(f'the keyword "{name}" is not supported')


def _shown(value: Any) -> str:
    return repr(value)[:100]


def _base(schema: Any, base: str) -> str:
    """Return the URI that references within a schema are relative to."""
    own = schema.get("$id") if isinstance(schema, dict) else None
    if not isinstance(own, str) or own.startswith("#"):
        return base
    return urldefrag(urljoin(base, own))[0]


def _distinct(shapes: Iterable[Shape]) -> Union:
    """Return each shape once, and all strings that are listed as one shape."""
    found: dict[Shape, None] = {}
    listed: dict[str, None] = {}
    for shape in shapes:
        if isinstance(shape, Strings) and shape.listed is not None and not (shape.patterns or shape.formats):
            listed |= dict.fromkeys(shape.listed)
        else:
            found[shape] = None
    return (*found, Strings(listed=tuple(listed))) if listed else tuple(found)


def _all(*parts: Schemas) -> Schemas:
    return tuple(dict.fromkeys(node for part in parts for node in part))


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _item(arrays: Arrays, place: int) -> Schemas:
    return arrays.prefix[place] if place < len(arrays.prefix) else arrays.rest


def _arrays_of_both(one: Arrays, other: Arrays) -> Arrays:
    length = max(len(one.prefix), len(other.prefix))
    return Arrays(
        minimum=max(one.minimum, other.minimum),
        maximum=_least(one.maximum, other.maximum),
        prefix=tuple(_all(_item(one, place), _item(other, place)) for place in range(length)),
        rest=_all(one.rest, other.rest),
    )


def _entries(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise GrammarError(f"{name}: should be an object")
    return value


def _size(schema: Mapping[str, Any], name: str) -> int | None:
    if name not in schema:
        return None
    number = exact(schema[name], name)
    if not is_whole(number) or number < 0:
        raise GrammarError(f"{name}: should be an integer from 0")
    if number < _MAX_SIZE:
        return int(number)
    if name.startswith("min"):
        raise GrammarError(f"{name}: is too large")
    return None


def _numbers(schema: Mapping[str, Any], *, is_integer: bool) -> Numbers:
    found = Numbers(multiple=Fraction(1) if is_integer else None)
    for name, exclusive, is_low in (("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False)):
        # In draft 4 the exclusive keywords are booleans.
        for keyword, is_open in ((name, schema.get(exclusive) is True), (exclusive, True)):
            if keyword not in schema or isinstance(schema[keyword], bool) and keyword == exclusive:
                continue
            bound = exact(schema[keyword], keyword)
            found &= Numbers(low=bound, low_open=is_open) if is_low else Numbers(high=bound, high_open=is_open)
    if "multipleOf" in schema:
        step = exact(schema["multipleOf"], "multipleOf")
        if step <= 0:
            raise GrammarError("multipleOf: should be greater than 0")
        found &= Numbers(multiple=Fraction(step))
    return found


def _strings(schema: Mapping[str, Any]) -> Strings:
    pattern, name = schema.get("pattern"), schema.get("format")
    if not isinstance(pattern, str | None):
        raise GrammarError("pattern: should be a string")
    patterns = [] if pattern is None else [rust_pattern(pattern)]
    formats = [name] if isinstance(name, str) and name in FORMATS else []
    if formats and formats[0] in _FORMAT_PATTERNS:
        patterns.append(rust_pattern(_FORMAT_PATTERNS[formats[0]]))
    return Strings(
        minimum=_size(schema, "minLength") or 0,
        maximum=_size(schema, "maxLength"),
        patterns=tuple(patterns),
        formats=tuple(formats),
        sources=() if pattern is None else (pattern,),
    )
