"""Structural tags in Lark's notation: free text in which some parts follow a grammar.

Two shapes are accepted, as vLLM names them. The older one has ``structures`` (begin, schema, end) and ``triggers``:
when the text has a trigger, the structure that begins with it must follow. The newer one has a ``format``, which is
built of the types below. Text that is a special token of the model stands for that token.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

from quire_engine.grammar.json_lark import json_grammar
from quire_engine.grammar.spec import GrammarError

_MAX_DEPTH = 32
_TEXT = r"/(.|\n)*/"


def structural_tag_grammars(tag: Any, special_tokens: Mapping[str, int]) -> list[dict[str, str]]:
    """Return the grammar of a structural tag for llguidance, and those that it names. Raises GrammarError."""
    if not isinstance(tag, dict):
        raise GrammarError("a structural tag should be an object")
    writer = _Writer(special_tokens)
    if "structures" in tag or "triggers" in tag:
        root = writer.format(_triggered(tag), 0)
    elif "format" in tag:
        root = writer.format(tag["format"], 0)
    else:
        raise GrammarError("a structural tag should have format, or structures and triggers")
    return writer.grammars(root)


def _triggered(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the older shape in the newer one."""
    tags = [
        {
            "type": "tag",
            "begin": _field(structure, "begin", str),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end", ""),
        }
        for structure in _objects(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Rules in Lark's notation. Each method returns an expression, and adds the rules that it needs."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []

    def grammars(self, root: str) -> list[dict[str, str]]:
        """Return the grammar that starts with an expression, and those that it names."""
        return [{"lark_grammar": "\n".join([f"start: {root}", *self._rules, ""])}, *self._others]

    def format(self, value: Any, depth: int) -> str:
        """Return the expression of one format."""
        kind = value.get("type") if isinstance(value, dict) else None
        writers: dict[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": lambda each, _: self._literal(_field(each, "value", str)),
            "json_schema": lambda each, _: self._json(each.get("json_schema")),
            "regex": lambda each, _: self._regex(_field(each, "pattern", str)),
            "grammar": lambda each, _: self._nested(_field(each, "grammar", str)),
            "any_text": lambda each, _: self._rule(_TEXT, terminal=True),
            "sequence": lambda each, deep: " ".join(self._elements(each, "elements", deep)),
            "or": lambda each, deep: f"({' | '.join(self._elements(each, 'elements', deep))})",
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated_tags,
        }
        if kind not in writers:
            names = ", ".join(writers)
            raise GrammarError(f"the format {str(kind)[:40]!r} is not supported; expected one of {names}")
        if depth > _MAX_DEPTH:
            raise GrammarError(f"its formats are nested more than {_MAX_DEPTH} deep")
        return writers[kind](value, depth + 1)

    def _elements(self, value: Mapping[str, Any], name: str, depth: int) -> list[str]:
        return [self.format(element, depth) for element in _objects(value, name)]

    def _tag(self, tag: Mapping[str, Any], depth: int) -> str:
        return f"{self._literal(_field(tag, 'begin', str))} {self._inside(tag, depth)}"

    def _inside(self, tag: Mapping[str, Any], depth: int) -> str:
        """Return a tag without its begin."""
        content = tag.get("content")
        ends = tag.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError("end should be a string or an array of strings")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"({' | '.join(self._until(end) for end in ends)})"
        return f"{self.format(content, depth)} ({' | '.join(self._literal(end) for end in ends)})"

    def _triggered_tags(self, value: Mapping[str, Any], depth: int) -> str:
        triggers, tags = value.get("triggers"), _objects(value, "tags")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise GrammarError("triggers should be an array of strings that are not empty")
        alternatives = []
        for tag in tags:
            begin = _field(tag, "begin", str)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise GrammarError(f"no trigger is the start of {begin[:80]!r}")
            rest = self._literal(begin[len(trigger) :])
            alternatives.append(self._rule(f"{self._until(trigger)} {rest} {self._inside(tag, depth)}"))
        choice, text = f"({' | '.join(alternatives)})", self._rule(_TEXT, terminal=True)
        if value.get("stop_after_first"):
            return choice if value.get("at_least_one") else f"({choice} | {text})"
        return f"{choice}{'+' if value.get('at_least_one') else '*'} {text}"

    def _separated_tags(self, value: Mapping[str, Any], depth: int) -> str:
        separator = self._literal(_field(value, "separator", str))
        tag = self._rule(" | ".join(self._tag(tag, depth) for tag in _objects(value, "tags")))
        more = "" if value.get("stop_after_first") else f" ({separator} {tag})*"
        return f"({tag}{more})" if value.get("at_least_one") else f"({tag}{more})?"

    def _until(self, end: str) -> str:
        """Return text up to the first place that has ``end``, and ``end`` itself."""
        text = self._rule(_TEXT, terminal=True)
        pieces = self._pieces(end)
        if not pieces or pieces[0].startswith("<["):
            return " ".join([text, *pieces])
        return " ".join([self._rule(f"{text} {pieces[0]}", lazy=True), *pieces[1:]])

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        """Return a text as strings and special tokens in Lark's notation."""
        pieces: list[str] = []
        place = 0
        for match in self._split.finditer(text) if self._split is not None else ():
            pieces += [text[place : match.start()], match[0]]
            place = match.end()
        pieces.append(text[place:])
        return [
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise GrammarError("a schema should be an object")
        return self._nested(json_grammar(schema, None))

    def _regex(self, pattern: str) -> str:
        return self._rule(f"/{llguidance.regex_to_lark(pattern, '')}/", terminal=True)

    def _nested(self, text: str) -> str:
        name = f"grammar_{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _rule(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _objects(value: Mapping[str, Any], name: str) -> Sequence[dict[str, Any]]:
    items = value.get(name)
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise GrammarError(f"{name} should be an array of objects that is not empty")
    return items


def _field(value: Mapping[str, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        raise GrammarError(f"{name} should be a string")
    return found
