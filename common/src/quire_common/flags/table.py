"""From a command line and an environment to values, with every problem collected.

A flag takes precedence over its environment variable, which takes precedence over the default.
"""

import argparse
import difflib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from quire_common.errors import FlagsError
from quire_common.flags.kinds import Flag

_INDENT = " " * 30


class FlagValues:
    """The values that were read, and the problems found so far."""

    def __init__(self, flags: Mapping[str, Flag], values: dict[str, Any], problems: list[str]) -> None:
        self._flags, self._values = flags, values
        self.problems = problems

    def __getitem__(self, name: str) -> Any:
        """Return the value that was set, else the default; None where there is neither, or the value is wrong."""
        flag = self._flags[name]
        if name in self._values or flag.default is None:
            return self._values.get(name)
        return flag.kind.parse(flag.default)

    def is_set(self, name: str) -> bool:
        """Return whether a flag or a variable set it."""
        return name in self._values

    def check(self) -> None:
        """Raise ``FlagsError`` if there are problems."""
        if self.problems:
            raise FlagsError(self.problems)


class _Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise FlagsError(
            re.sub(r"^argument (--[\w-]+)\S*: ignored explicit argument", r"\1: takes no value, not", message)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagTable:
    """The flags of one program, in groups."""

    program: str
    env_prefix: str
    """The start of the variables: ``QUIRE_ENGINE_`` gives ``QUIRE_ENGINE_PORT`` for ``--port``."""
    groups: Mapping[str, tuple[Flag, ...]]
    intro: str
    """The help above the flags."""
    outro: str
    """The help below the flags."""
    positional: str | None = None
    """The flag that a word without a flag sets."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Flags of similar programs that this one does not have, and what to use instead."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Flags that earlier versions of this program had, and what to do without them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of flags, with their dashes, such as -tp; the value has the same meaning."""
    always: frozenset[str] = frozenset()
    """Switches of similar programs that ask for what this program always does: they are accepted and change nothing."""
    separator: str | None = None
    """The separator of several values in one text. None: spaces in a variable, and no separator in an argument."""
    reject_unknown_variables: bool = False
    """True if a variable with the prefix but without a flag is a problem."""
    flags: Mapping[str, Flag] = field(init=False)

    def __post_init__(self) -> None:
        flags = {flag.name: flag for group in self.groups.values() for flag in group}
        object.__setattr__(self, "flags", flags)

    def variable(self, name: str) -> str:
        """Return the environment variable of a flag."""
        return self.env_prefix + name.upper().replace("-", "_")

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> FlagValues:
        """Return the values and the problems; the caller adds its own problems and calls ``check``."""
        problems: list[str] = []
        values = self._from_environment(environ, problems) | self._from_command_line(argv, problems)
        problems.extend(
            f"--{name} is missing: {flag.help}"
            for name, flag in self.flags.items()
            if flag.required and name not in values
        )
        return FlagValues(self.flags, values, problems)

    def _from_command_line(self, argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
        plain, dotted = self._without_dots([self._spelled(argument) for argument in argv], problems)
        values = self._from_arguments(plain, problems)
        for name, content in dotted.items():
            values[name] = _merged(values.get(name) or {}, content)
        return values

    def _spelled(self, argument: str) -> str:
        """Return the argument with the dashes that a flag of this name has, where it was written with underscores."""
        name, equals, value = argument.partition("=")
        base, dot, rest = name.partition(".")
        if not base.startswith("--") or "_" not in base:
            return argument
        return f"{base.replace('_', '-')}{dot}{rest}{equals}{value}"

    def _without_dots(self, argv: Sequence[str], problems: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Split off fields of JSON objects, written as ``--flag.field.field VALUE``."""
        plain: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        arguments = iter(argv)
        for argument in arguments:
            name, equals, value = argument.partition("=")
            written, *path = name.split(".")
            base = self.aliases.get(written, written.removeprefix("--"))
            flag = self.flags.get(base) if argument.startswith("-") else None
            if not path or flag is None or not flag.kind.has_fields:
                plain.append(argument)
                continue
            text = value if equals else next(arguments, None)
            if text is None:
                problems.append(f"{argument}: a value is missing")
                continue
            content: Any = _json_or_text(text)
            for step in reversed(path):
                content = {step: content}
            objects[base] = _merged(objects.get(base, {}), content)
        return plain, objects

    def _from_arguments(self, argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
        try:
            known, unknown = self._parser().parse_known_args(list(argv))
        except FlagsError as error:
            problems.extend(error.problems)
            return dict.fromkeys(name for name, flag in self.flags.items() if flag.required)
        given: dict[str, Any] = vars(known)
        given.pop("always", None)
        word = given.pop("positional", None)
        unknown_flags = [argument for argument in unknown if argument.startswith("-")]
        problems.extend(self._unknown_flag(argument) for argument in unknown_flags)
        if not unknown_flags:  # else a word without a flag may be the value of the unknown one
            problems.extend(f"unexpected argument {argument!r}" for argument in unknown)
        if word is not None and self.positional is not None:
            other = given.setdefault(self.positional, word)
            if other != word and not unknown_flags:
                problems.append(f"the {self.positional} is given twice: {word} and {other}")
        return {name: self._parse(name, value, f"--{name}", problems) for name, value in given.items()}

    def _parser(self) -> _Parser:
        parser = _Parser(prog=self.program, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        if self.positional is not None:
            parser.add_argument("positional", nargs="?")
        for name in self.always:
            parser.add_argument(f"--{name}", dest="always", action="store_const", const="true")
        for name, flag in self.flags.items():
            names = [f"--{name}", *(alias for alias, meant in self.aliases.items() if meant == name)]
            if flag.kind.is_switch:
                parser.add_argument(*names, dest=name, action="store_const", const="true")
                if flag.kind.is_negatable:
                    negated = [f"--no-{each.removeprefix('--')}" for each in names]
                    parser.add_argument(*negated, dest=name, action="store_const", const="false")
            elif flag.many:
                parser.add_argument(*names, dest=name, nargs="*", action="extend")
            else:  # nargs="?" makes a missing value one problem among others, which does not end the parsing
                parser.add_argument(*names, dest=name, nargs="?", const=None)
        return parser

    def _from_environment(self, environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
        by_variable = {self.variable(name): name for name in self.flags}
        removed = {self.variable(name): reason for name, reason in self.removed.items()}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(self.env_prefix) or _is_service_link(variable, text):
                continue
            name = by_variable.get(variable)
            if variable in removed:
                problems.append(f"the variable {variable} was removed: {removed[variable]}")
            elif name is None:
                if self.reject_unknown_variables:
                    problems.append(f"the variable {variable} is unknown{_suggestion(variable, by_variable)}")
            elif text != "":
                values[name] = self._parse(name, self._split(name, text), variable, problems)
        return values

    def _split(self, name: str, text: str) -> str | list[str]:
        if not self.flags[name].many:
            return text
        return text.split() if self.separator is None else [text]

    def _parse(self, name: str, given: str | list[str] | None, where: str, problems: list[str]) -> Any:
        flag = self.flags[name]
        if isinstance(given, list) and self.separator is not None:
            given = [part.strip() for item in given for part in item.split(self.separator) if part.strip()]
        if given is None or given == []:
            problems.append(f"{where}: a value is missing; it takes {flag.help}")
            return None
        values = []
        for text in _items(given) if isinstance(given, list) else [given]:
            try:
                values.append(flag.kind.parse(text))
            except ValueError as error:
                reason = f" ({error})" if str(error) else ""
                problems.append(f"{where}: expected {flag.kind.expected}, got {text!r}{reason}")
                return None
        return tuple(values) if flag.many else values[0]

    def _unknown_flag(self, argument: str) -> str:
        written = argument.partition("=")[0].partition(".")[0]
        name = written.lstrip("-").replace("_", "-")
        if reason := self.removed.get(name):
            return f"--{name} was removed: {reason}"
        if hint := self.hints.get(name, self.hints.get(name.removeprefix("no-"))):
            return f"{written} does not exist here: {hint}"
        near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.5)
        return f"--{name} is unknown" + (f"; did you mean --{near[0]}?" if near else "")

    def help_text(self, width: int = 120) -> str:
        """Return the help as one grouped page."""
        groups = [
            f"{group}:\n" + "\n".join(_help_row(flag, width) for flag in flags) + "\n"
            for group, flags in self.groups.items()
        ]
        return "\n".join([self.intro, *groups, self.outro])

    def schema(self) -> dict[str, Any]:
        """Return the flags as JSON Schema, for other programs that check arguments of this one."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"Flags of {self.program}",
            "description": "A property is a flag without its leading dashes.",
            "type": "object",
            "properties": {name: {**flag.schema(), "x-env": self.variable(name)} for name, flag in self.flags.items()},
            "required": [name for name, flag in self.flags.items() if flag.required],
            "additionalProperties": False,
            "x-removed": dict(self.removed),
        }


def _merged(content: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(content)
    for name, value in other.items():
        present = merged.get(name)
        merged[name] = _merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    return merged


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _items(given: Sequence[str]) -> Sequence[str]:
    """Return the values of a flag that takes several: one argument may be a JSON list of them."""
    if len(given) != 1 or not given[0].startswith("["):
        return given
    values = _json_or_text(given[0])
    return [str(value) for value in values] if isinstance(values, list) and values else given


def _is_service_link(variable: str, text: str) -> bool:
    """Return whether Kubernetes set this variable: it describes a Service named quire-engine to every pod that way."""
    is_address = text.startswith(("tcp://", "udp://", "sctp://"))
    return is_address or re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_", variable) is not None


def _suggestion(word: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _help_row(flag: Flag, width: int) -> str:
    metavar = flag.kind.metavar + (" ..." if flag.many else "")
    left = f"  --{flag.name} {metavar}".rstrip()
    shown = flag.default or flag.unset
    text = flag.help + (f" (default: {shown})" if shown else " (required)" if flag.required else "")
    lines = textwrap.wrap(text, max(40, width - len(_INDENT)))
    if len(left) > len(_INDENT) - 2:
        return "\n".join([left, *(_INDENT + line for line in lines)])
    return "\n".join([left.ljust(len(_INDENT)) + lines[0], *(_INDENT + line for line in lines[1:])])
