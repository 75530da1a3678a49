"""JSON schemas as grammars in Lark's notation.

llguidance's own compiler of schemas reads numbers as doubles, and lets a quotation mark through where a pattern
excludes it. So only strings with formats, and some multiples, are left to it. A grammar has properties in the order of
the schema, then those of patterns and all others.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llguidance

from quire_engine.grammar.numbers import Numbers
from quire_engine.grammar.patterns import quoted_pattern
from quire_engine.grammar.shapes import Arrays, Document, Objects, Schemas, Shape, Strings, Union, Word
from quire_engine.grammar.spec import GrammarError

WHITESPACE = r" |\r?\n[ \t]{0,20}"
"""The space between tokens of JSON, unless a request names another. It is bounded, because small models tend to write
space without end where they may."""

_MAX_STATES = 20_000
"""The most places in an object that differ in what may follow."""
_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf'\\["\\\/bfnrt]|\\u([0-9abcefABCEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}'
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
_CHARACTER = rf'[^"\\\x00-\x1f]|{_ESCAPE}'
"""A character of a string, with every escape of JSON."""
_PLAIN_CHARACTER = r'[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f])'
"""A character of a name, which has one spelling, so that no property comes again under another one."""


def json_grammar(schema: Any, whitespace_pattern: str | None) -> str:
    """Return the grammar of a JSON schema. Raises GrammarError.

    ``whitespace_pattern`` is a regular expression of the space between tokens; None means a space or a line.
    """
    space = WHITESPACE if whitespace_pattern is None else whitespace_pattern
    if whitespace_pattern and (error := _error({"lark_grammar": f"start: /{_in_lark(space)}/"})):
        raise GrammarError(f"whitespace_pattern: {error}")
    document = Document(schema, _is_allowed)
    if not document.possible(document.root):
        raise GrammarError("it allows no value")
    return _Writer(document, space).grammar()


@lru_cache(maxsize=1024)
def _is_allowed(strings: Strings) -> bool:
    """Return whether a string is allowed. Raises GrammarError where that cannot be decided."""
    error = _error({"json_schema": _string_schema(strings)})
    if not error:
        return True
    if error.startswith("Unsatisfiable schema"):
        return False
    shown = " and ".join(repr(source[:200]) for source in strings.sources) or f"of the format {strings.formats[0]}"
    reason = "is too complex" if error.startswith("Unable to determine") else "cannot be compiled"
    raise GrammarError(f"the pattern {shown} {reason}")


@lru_cache(maxsize=4096)
def _class_has(expression: str, character: str) -> bool:
    return not _error(
        {"json_schema": {"allOf": [{"const": character}, {"type": "string", "pattern": f"^{expression}$"}]}}
    )


def _error(grammar: dict[str, Any]) -> str:
    """Return the reason for which llguidance refuses a grammar, in one line; empty for one that it accepts."""
    lines = llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [grammar]})).splitlines()
    return " ".join(line.strip() for line in lines if line.strip(" ^"))[:500]


def _in_lark(expression: str) -> str:
    return llguidance.regex_to_lark(expression, "")


def _string_schema(strings: Strings) -> dict[str, Any]:
    """Return strings as a JSON schema for llguidance."""
    schema: dict[str, Any] = {"type": "string", "minLength": strings.minimum}
    if strings.maximum is not None:
        schema["maxLength"] = strings.maximum
    if strings.listed is not None:
        schema = {"enum": list(strings.listed)}
    kinds = [("pattern", each) for each in strings.patterns] + [("format", each) for each in strings.formats]
    return {**schema, "allOf": [{"type": "string", name: value} for name, value in kinds]} if kinds else schema


def _literal(text: str) -> str:
    """Return a text of JSON as a string in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _times(least: int, most: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (least, most), f"{{{least},{'' if most is None else most}}}"
    )


class _Writer:
    """Writes the rules of one document."""

    def __init__(self, document: Document, space: str) -> None:
        self._document = document
        self._space = space
        self._rules: dict[str, str] = {}
        self._names: dict[Any, str] = {}
        self._waiting: list[tuple[str, Schemas]] = []

    def grammar(self) -> str:
        """Return the grammar, whose space has the same form in the schemas that llguidance compiles."""
        start = self._value(self._document.root)
        while self._waiting:
            name, schemas = self._waiting.pop()
            self._rules[name] = self._union(self._document.union(schemas))
        head = [f"start: {start}"]
        if self._space:
            head = ['%llguidance {"ignore_once": true}', f"%ignore /{_in_lark(self._space)}/", *head]
        return "\n".join([*head, *(f"{name}: {body}" for name, body in self._rules.items()), ""])

    def _named(self, key: Any, kind: str, body: Callable[[], str]) -> str:
        """Return the rule or terminal with a key; write it at the first call."""
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{kind}{len(self._names)}"
            self._rules[name] = body()
        return name

    def _terminal(self, body: str) -> str:
        return self._named(("terminal", body), "T", lambda: body)

    def _rule(self, body: str) -> str:
        return self._named(("rule", body), "r", lambda: body)

    def _schema(self, schema: dict[str, Any]) -> str:
        """Return the rule of a schema that llguidance compiles."""
        options: dict[str, Any] = {"whitespace_flexible": bool(self._space)}
        if self._space:
            options["whitespace_pattern"] = self._space
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def _value(self, schemas: Schemas) -> str:
        """Return the rule of the values that all schemas allow."""
        if not schemas:
            return self._any()
        name = self._names.get(schemas)
        if name is None:
            name = self._names[schemas] = f"r{len(self._names)}"
            self._waiting.append((name, schemas))
        return name

    def _any(self) -> str:
        return self._named("any", "r", lambda: self._union(self._document.union(())))

    def _union(self, union: Union) -> str:
        """Return the choice of shapes; all numbers are one terminal."""
        choices = [f'"{shape.text}"' for shape in union if isinstance(shape, Word)]
        numbers = [shape.terminal() for shape in union if isinstance(shape, Numbers) and not shape.is_empty()]
        if texts := [each for each in numbers if isinstance(each, str)]:
            choices.append(self._terminal(" | ".join(texts)))
        choices += [self._schema(each) for each in numbers if isinstance(each, dict)]
        for shape in union:
            if isinstance(shape, Strings | Arrays | Objects) and self._document.is_possible(shape):
                choices.append(self._named(shape, "r", lambda shape=shape: self._shape(shape)))  # type: ignore[misc]
        return " | ".join(choices)

    def _shape(self, shape: Shape) -> str:
        match shape:
            case Strings():
                return self._strings(shape)
            case Arrays():
                return self._array(shape)
            case Objects():
                return self._object(shape)
        raise AssertionError("words and numbers are terminals")

    def _strings(self, strings: Strings) -> str:
        if strings.formats:
            return self._schema(_string_schema(strings))
        if strings.patterns:
            return self._terminal(self._quoted(strings))
        if strings.listed is not None:
            return self._terminal(" | ".join(_literal(_json(text)) for text in strings.listed))
        return self._terminal(f'/"({_CHARACTER}){_times(strings.minimum, strings.maximum)}"/')

    def _array(self, arrays: Arrays) -> str:
        prefix, most = list(arrays.prefix), arrays.maximum
        impossible = [place for place, item in enumerate(prefix) if not self._document.possible(item)]
        if impossible:
            most = impossible[0] if most is None else min(most, impossible[0])
        prefix = prefix[:most]
        rest = None
        if (most is None or most > len(prefix)) and self._document.possible(arrays.rest):
            rest = self._value(arrays.rest)
        more = self._sequence(rest, len(prefix), arrays.minimum, most)
        assert more is not None
        for place in reversed(range(len(prefix))):
            comma = '"," ' if place else ""
            more = self._rule(f"{comma}{self._value(prefix[place])} {more}")
            if place >= arrays.minimum:
                more = f"{more}?"
        return f'"[" {more} "]"'

    def _sequence(self, item: str | None, count: int, least: int, most: int | None) -> str | None:
        """Return what may follow ``count`` items, so that there are enough and not too many; None where nothing may."""
        least = max(0, least - count)
        most = None if most is None else most - count
        if item is None or most == 0:
            return "" if least == 0 else None
        if count:
            return f'("," {item}){_times(least, most)}'
        more = f' ("," {item}){_times(max(0, least - 1), None if most is None else most - 1)}'
        items = item if most == 1 else f"{item}{more}"
        return items if least else f"({items})?"

    def _object(self, objects: Objects) -> str:
        possible = self._document.possible
        taken = [name for name, _ in objects.properties]
        items = [
            (f'{_literal(_json(name))} ":" {self._value(value)}', name in objects.required)
            for name, value in objects.properties
            if possible(value)
        ]
        others = [
            f'{self._names_of(names, taken)} ":" {self._value(value)}'
            for names, value in objects.patterns
            if possible(value)
        ]
        if possible(objects.rest) and (objects.maximum is None or objects.maximum > len(objects.required)):
            names = self._other_names([names for names, _ in objects.patterns], taken)
            others.append(f'{names} ":" {self._value(objects.rest)}')
        other = self._rule(" | ".join(others)) if others else None
        return f'"{{" {self._properties(items, other, objects.minimum, objects.maximum)} "}}"'

    def _properties(self, items: list[tuple[str, bool]], other: str | None, least: int, most: int | None) -> str:
        """Return properties in their order, then others.

        What may follow depends on the next property and on how many there are so far, as far as the bounds need it.
        """
        top = max(1, least) if most is None else most
        counts = [{0}]
        for _, required in items:
            more = {min(count + 1, top) for count in counts[-1] if most is None or count < most}
            counts.append(more if required else counts[-1] | more)
        if sum(map(len, counts)) > _MAX_STATES:
            raise GrammarError("it is too complex: minProperties or maxProperties with so many properties")
        following = {count: self._sequence(other, count, least, most) for count in counts[-1]}
        for (item, required), reached in zip(reversed(items), reversed(counts[:-1]), strict=True):
            before: dict[int, str | None] = {}
            for count in reached:
                taken = following.get(min(count + 1, top)) if most is None or count < most else None
                before[count] = self._step(item, count, taken, None if required else following[count])
            following = before
        assert following[0] is not None
        return following[0]

    def _step(self, item: str, count: int, taken: str | None, left: str | None) -> str | None:
        """Return a property with what follows it, or what follows if it is left out; None allows no text."""
        if taken is None:
            return left
        item = f'"," {item}' if count else item
        if taken == left:
            return self._rule(f"({item})? {taken}")
        if not left:
            return self._rule(f"{item} {taken}") + ("" if left is None else "?")
        return self._rule(f"{item} {taken} | {left}")

    def _names_of(self, names: Strings, taken: list[str]) -> str:
        """Return the names that a pattern allows, but for those of properties."""
        among = [name for name in taken if self._document.has_name(names, name)]
        if not among:
            return self._schema(_string_schema(names)) if names.formats else self._terminal(self._quoted(names))
        return self._terminal(f"{self._quoted(names)} & ~({' | '.join(_literal(_json(name)) for name in among)})")

    def _other_names(self, patterns: list[Strings], taken: list[str]) -> str:
        """Return all names but those of properties and patterns."""
        if not patterns and not taken:
            return self._strings(Strings())
        excluded = [*(_literal(_json(name)) for name in taken), *(f"({self._quoted(names)})" for names in patterns)]
        return self._terminal(f'/"({_PLAIN_CHARACTER})*"/ & ~({" | ".join(excluded)})')

    def _quoted(self, strings: Strings) -> str:
        """Return the strings without escapes that are not needed, so that each has one spelling."""
        if strings.formats:
            raise GrammarError("propertyNames: a format is not supported beside properties")
        parts = [f"/{_in_lark(quoted_pattern(source, _class_has))}/" for source in strings.sources]
        if strings.minimum or strings.maximum is not None or not parts:
            parts.append(f'/"({_PLAIN_CHARACTER}){_times(strings.minimum, strings.maximum)}"/')
        return " & ".join(parts)
