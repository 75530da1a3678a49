"""Patterns of JSON schemas, which are regular expressions of ECMA 262, in the syntax of Rust's regex crate.

The syntax is that of ECMA 262 with its additions for browsers (Annex B), over code points and with Unicode
properties, as with the flag ``u``. Whatever has another meaning in Rust's syntax, or none in ECMA 262, is written out
or refused: look-around, back references, word boundaries, flags, and letters without a meaning after a backslash.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

from quire_engine.grammar.spec import GrammarError

_MAX_BRANCHES = 64
_MAX_NESTING = 100
_MAX_CODE = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUOTED = {0x22: '\\\\"', 0x5C: "\\\\\\\\", 0x08: r"\\b", 0x0C: r"\\f", 0x0A: r"\\n", 0x0D: r"\\r", 0x09: r"\\t"}


@dataclass(frozen=True, slots=True)
class _Set:
    """One character of a set."""

    ranges: Ranges
    properties: tuple[str, ...] = ()
    """Classes of Unicode properties, such as ``\\p{L}``."""
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    inner: "_Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    is_start: bool


_Node = _Set | _Sequence | _Choice | _Repeat | _Anchor
_ANY = _Set(((0, _MAX_CODE),))


def rust_pattern(pattern: str) -> str:
    """Return a pattern of ECMA 262, anchored at both ends, in Rust's syntax. Raises GrammarError."""
    return f"^(?:{_choice_of(pattern, _raw)})$"


def quoted_pattern(pattern: str, has: Callable[[str, str], bool]) -> str:
    """Return the same for the text of a string in JSON, which has no escapes that are not needed, without anchors.

    ``has`` returns whether a character is in a class of Rust's syntax. Raises GrammarError.
    """
    return f'"(?:{_choice_of(pattern, lambda characters: _json(characters, has))})"'


def _choice_of(pattern: str, write: Callable[[_Set], str]) -> str:
    branches = [_written(branch, write) for branch in _branches_of(pattern)]
    return "|".join(branches) if branches else write(_Set(()))


class _Parser:
    """Reads one pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def read(self) -> _Node:
        """Return the whole pattern."""
        node = self._choice()
        if self._place < len(self._text):
            self.refuse("a group that is closed is not open")
        return node

    def refuse(self, reason: str) -> NoReturn:
        """Raise the GrammarError of this pattern."""
        text = self._text if len(self._text) <= 100 else f"{self._text[:100]}..."
        raise GrammarError(f"the pattern {text!r} is not supported: {reason}")

    def _next(self, expected: str) -> bool:
        if not self._text.startswith(expected, self._place):
            return False
        self._place += len(expected)
        return True

    def _match(self, expression: str) -> re.Match[str] | None:
        found = re.compile(expression).match(self._text, self._place)
        if found is not None:
            self._place = found.end()
        return found

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            self.refuse(f"it is nested more than {_MAX_NESTING} deep")
        branches = [self._sequence()]
        while self._next("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            items.append(self._repeated(self._atom()))
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _repeated(self, node: _Node) -> _Node:
        found = self._match(r"([*+?])|\{([0-9]+)(,?)([0-9]*)\}")
        if found is None or (found[3] == "" and found[4]):
            return node
        if isinstance(node, _Anchor):
            self.refuse("an anchor is repeated")
        if found[1]:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        else:
            least = int(found[2])
            most = int(found[4]) if found[4] else None if found[3] else least
        if most is not None and most < least:
            self.refuse("the numbers of a repetition are out of order")
        self._next("?")  # a lazy repetition matches the same strings
        if self._match(r"[*+?]|\{[0-9]+(,[0-9]*)?\}"):
            self.refuse("a repetition is repeated")
        return _Repeat(node, least, most)

    def _atom(self) -> _Node:
        if self._match(r"[*+?]|\{[0-9]+(,[0-9]*)?\}"):
            self.refuse("there is nothing to repeat")
        character = self._text[self._place]
        self._place += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape(in_class=False)
        if character in "^$":
            return _Anchor(character == "^")
        if character == ".":
            return _Set(_LINE_ENDS, negated=True)
        return _Set(((ord(character), ord(character)),))

    def _group(self) -> _Node:
        if self._match(r"\?(<?[=!])"):
            self.refuse("it has look-around")
        if self._next("?") and not self._match(r":|<[A-Za-z_$][\w$]*>"):
            self.refuse("ECMA 262 has no such group or flags")
        node = self._choice()
        if not self._next(")"):
            self.refuse("a group is unclosed")
        return node

    def _escape(self, *, in_class: bool) -> _Set:
        """Read what follows a backslash."""
        if self._place == len(self._text):
            self.refuse("it ends with a backslash")
        if found := self._match(r"([dws])|([DWS])"):
            ranges = _CLASSES[found[0].lower()]
            return _Set(ranges if found[1] else _complement(ranges))
        if found := self._match(r"([pP])\{([A-Za-z_]+(?:=[A-Za-z0-9_]+)?)\}"):
            return _Set((), (f"\\{found[1]}{{{found[2]}}}",))
        code = self._code(in_class=in_class)
        return _Set(((code, code),))

    def _code(self, *, in_class: bool) -> int:
        """Read the escape of one character."""
        if found := self._match(r"u[dD]([89abAB][0-9a-fA-F]{2})\\u[dD]([c-fC-F][0-9a-fA-F]{2})"):
            return 0x10000 + ((int(found[1], 16) - 0x800) << 10) + int(found[2], 16) - 0xC00
        if found := self._match(r"u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})"):
            code = int(found[1] or found[2] or found[3], 16)
            if code > _MAX_CODE or _SURROGATES[0] <= code <= _SURROGATES[1]:
                self.refuse(f"\\{found[0]} is no character")
            return code
        if found := self._match(r"c([A-Za-z])"):
            return ord(found[1]) % 32
        if self._match(r"0(?![0-9])"):
            return 0
        character = self._text[self._place]
        self._place += 1
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "b" and in_class:
            return 0x08
        if character in "bB":
            self.refuse("it has word boundaries")
        if character in "0123456789k":
            self.refuse("it has back references, or octal numbers")
        if character.isascii() and character.isalpha():
            self.refuse(f"\\{character} has no meaning in ECMA 262")
        return ord(character)

    def _class(self) -> _Set:
        """Read a class after its bracket. A hyphen next to a class of an escape stands for itself (Annex B)."""
        negated = self._next("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._next("]"):
            item = self._class_item()
            mark = self._place
            if not self._next("-") or self._text.startswith("]", self._place):
                self._place = mark
                ranges += item.ranges
                properties += item.properties
                continue
            last = self._class_item()
            if _is_character(item) and _is_character(last):
                if last.ranges[0][0] < item.ranges[0][0]:
                    self.refuse("a range of characters is out of order")
                ranges.append((item.ranges[0][0], last.ranges[0][0]))
                continue
            ranges += [*item.ranges, (0x2D, 0x2D), *last.ranges]
            properties += [*item.properties, *last.properties]
        return _Set(tuple(ranges), tuple(properties), negated)

    def _class_item(self) -> _Set:
        if self._place == len(self._text):
            self.refuse("a class is unclosed")
        character = self._text[self._place]
        self._place += 1
        if character == "\\":
            return self._escape(in_class=True)
        return _Set(((ord(character), ord(character)),))


def _is_character(item: _Set) -> bool:
    return not item.properties and len(item.ranges) == 1 and item.ranges[0][0] == item.ranges[0][1]


def _complement(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return (*found, (start, _MAX_CODE)) if start <= _MAX_CODE else tuple(found)


def _branches_of(pattern: str) -> list[_Sequence]:
    """Return the choices of a pattern as sequences without anchors, which match a whole string."""
    parser = _Parser(pattern)
    found = []
    for items in _flat(parser.read(), parser):
        if (whole := _unanchored(items)) is not None:
            found.append(_Sequence(tuple(whole)))
    return found


def _flat(node: _Node, parser: _Parser) -> list[list[_Node]]:
    """Return the choices of a node as sequences in which no item but an anchor has anchors within it."""
    if not _has_anchor(node):
        return [[node]]
    match node:
        case _Sequence():
            parts = [_flat(item, parser) for item in node.items]
            found = [sum(choice, []) for choice in product(*parts)] if _count(parts) <= _MAX_BRANCHES else []
        case _Choice():
            found = [branch for each in node.branches for branch in _flat(each, parser)]
        case _Repeat(least=0, most=1):
            found = [[], *_flat(node.inner, parser)]
        case _Repeat():
            parser.refuse("an anchor is within a repetition")
        case _:
            found = [[node]]
    if not 0 < len(found) <= _MAX_BRANCHES:
        parser.refuse("it has too many choices with anchors")
    return found


def _count(parts: list[list[list[_Node]]]) -> int:
    count = 1
    for part in parts:
        count *= len(part)
    return count


def _unanchored(items: list[_Node]) -> list[_Node] | None:
    """Return a sequence for a whole string without its anchors; None where it matches no string.

    What precedes the start or follows the end must match the empty string.
    """
    starts = [place for place, item in enumerate(items) if isinstance(item, _Anchor) and item.is_start]
    ends = [place for place, item in enumerate(items) if isinstance(item, _Anchor) and not item.is_start]
    start, end = (starts[-1] + 1 if starts else 0), (ends[0] if ends else len(items))
    outside = [*items[:start], *items[end:]] if start <= end else items
    if not all(_is_nullable(item) for item in outside):
        return None
    inside = items[start:end]
    free = _Repeat(_ANY, 0, None)
    return [*([] if starts else [free]), *inside, *([] if ends else [free])]


def _has_anchor(node: _Node) -> bool:
    match node:
        case _Sequence():
            return any(_has_anchor(item) for item in node.items)
        case _Choice():
            return any(_has_anchor(branch) for branch in node.branches)
        case _Repeat():
            return _has_anchor(node.inner)
    return isinstance(node, _Anchor)


def _is_nullable(node: _Node) -> bool:
    match node:
        case _Sequence():
            return all(_is_nullable(item) for item in node.items)
        case _Choice():
            return any(_is_nullable(branch) for branch in node.branches)
        case _Repeat():
            return node.least == 0 or _is_nullable(node.inner)
    return isinstance(node, _Anchor)


def _written(node: _Node, write: Callable[[_Set], str]) -> str:
    match node:
        case _Sequence():
            return "".join(_written(item, write) for item in node.items)
        case _Choice():
            return f"(?:{'|'.join(_written(branch, write) for branch in node.branches)})"
        case _Repeat():
            times = f"{{{node.least},{'' if node.most is None else node.most}}}"
            shown = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most), times)
            inner = _written(node.inner, write)
            return f"{inner if isinstance(node.inner, _Set) else f'(?:{inner})'}{shown}"
        case _Set():
            return write(node)
    raise AssertionError("an anchor is left")


def _hex(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _raw(characters: _Set) -> str:
    """Return a class in Rust's syntax; all characters are escaped, so that none is an operator."""
    items = []
    for first, last in characters.ranges:
        first = _SURROGATES[1] + 1 if _SURROGATES[0] <= first <= _SURROGATES[1] else first
        last = _SURROGATES[0] - 1 if _SURROGATES[0] <= last <= _SURROGATES[1] else last
        if first <= last:
            items.append(_hex(first) if first == last else f"{_hex(first)}-{_hex(last)}")
    items += characters.properties
    if not items:
        negated = not characters.negated
        return f"[{'^' if negated else ''}{_hex(0)}-{_hex(_MAX_CODE)}]"
    return f"[{'^' if characters.negated else ''}{''.join(items)}]"


def _json(characters: _Set, has: Callable[[str, str], bool]) -> str:
    """Return the same for the characters of a string in JSON."""
    ranges = _complement(characters.ranges) if characters.negated else characters.ranges
    codes = [*range(0x20), 0x22, 0x5C]
    if characters.properties:
        codes = [code for code in codes if has(_raw(characters), chr(code))]
    else:
        codes = [code for code in codes if any(first <= code <= last for first, last in ranges)]
    choices = [_QUOTED.get(code, f"\\\\u{code:04x}") for code in codes]
    plain = f"[{_raw(characters)}&&[^{_hex(0)}-{_hex(0x1F)}{_hex(0x22)}{_hex(0x5C)}]]"
    return f"(?:{'|'.join([plain, *choices])})"
