"""The kinds of values of the resource's fields: text, numbers, durations, sizes, choices, content passed on."""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar

from quire_common.names import object_name_problem
from quire_common.quantities import format_duration, parse_bytes, parse_duration_seconds
from quire_operator.api.fields import Fields, near_word, one_of, shown
from quire_operator.api.schema import JSON, Declared, Kind, Rule

_MAX_INT32 = 2**31 - 1
_PERCENT = re.compile("(100|[1-9]?[0-9])%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Kind):
    """A string that is not empty."""

    min_length: int | None = None
    max_length: int
    check: Callable[[str], str | None] | None = None
    """Returns the reason against a string; ``rules`` say the same to the API server."""

    def schema(self, value_type: Any) -> JSON:
        least = {} if self.min_length is None else {"minLength": self.min_length}
        return {"type": "string", **least, "maxLength": self.max_length}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        return document.text(name, default=default, check=self._problem)

    def _problem(self, text: str) -> str | None:
        if (reason := self.check(text) if self.check else None) is not None:
            return reason
        return f"must have at most {self.max_length} characters" if len(text) > self.max_length else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectName(Text):
    max_length: int = 253
    check: Callable[[str], str | None] | None = object_name_problem
    rules: tuple[Rule, ...] = (
        Rule(
            cel="self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
            message="must be a Kubernetes object name: lower-case letters, digits, '-' and '.'",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretReference(Kind):
    """A mapping ``{secretName: …}``, read as the name."""

    unit: ClassVar[str] = "_secret"
    secret: str
    """The description of the name."""

    def schema(self, value_type: Any) -> JSON:
        name = self._name.schema
        return {"type": "object", "required": ["secretName"], "properties": {"secretName": name}}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        if not document.has(name):
            return default
        reference = document.section(name)
        secret = self._name.read(reference)
        reference.done()
        return secret

    @property
    def _name(self) -> Declared:
        return Declared(attribute="", name="secretName", kind=ObjectName(self.secret), type=str, default=MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Kind):
    """A whole number within bounds, or one of ``choices``."""

    minimum: int = 0
    maximum: int = _MAX_INT32
    choices: tuple[int, ...] = ()

    @property
    def placeholder(self) -> Any:
        return self.minimum

    def schema(self, value_type: Any) -> JSON:
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return {"type": "integer", "format": "int32", **({"enum": [*self.choices]} if self.choices else bounds)}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        number = document.integer(name, default=default, minimum=self.minimum, maximum=self.maximum)
        if self.choices and number not in self.choices:
            document.problem(name, f"must be one of {', '.join(map(str, self.choices))}, got {number}")
            return default
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Boolean(Kind):
    def schema(self, value_type: Any) -> JSON:
        return {"type": "boolean"}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        value = document.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        document.problem(name, f"must be true or false, got {shown(value)}")
        return default

    def arguments(self, value: Any) -> list[str]:
        """Return the last flag, which is the one against the feature, for false."""
        return [] if value or not self.flags else [f"--{self.flags[-1]}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Kind):
    """One of the words of an enumeration, which the engine takes in lower case."""

    removed: Mapping[str, str] = field(default_factory=dict)
    """The words of earlier versions, and what to do instead. The schema keeps them, as ``Removed`` fields: a stored
    object may have one, and a new one is refused with this message."""

    def schema(self, value_type: Any) -> JSON:
        rules = [
            Rule(cel=f"self != '{word}'", message=f"{word} was removed: {advice}").schema
            for word, advice in self.removed.items()
        ]
        words = {"type": "string", "enum": [*(word.value for word in value_type), *self.removed]}
        return {**words, "x-kubernetes-validations": rules} if rules else words

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        value, words = document.raw(name), [word.value for word in value_type]
        if value is None:
            return default
        if value in words:
            return value_type(value)
        if isinstance(value, str) and value in self.removed:
            document.problem(name, f"{value} was removed: {self.removed[value]}")
        else:
            document.problem(name, f"must be {one_of(words)}, got {shown(value)}{near_word(value, words)}")
        return default

    def in_yaml(self, value: Any) -> Any:
        return value.value

    def arguments(self, value: Any) -> list[str]:
        return Kind.arguments(self, None if value is None else value.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration(Kind):
    """A duration string, read as seconds."""

    unit: ClassVar[str] = "_seconds"
    minimum: float = 0.0
    maximum: float = 86_400.0

    def schema(self, value_type: Any) -> JSON:
        least, most = format_duration(self.minimum), format_duration(self.maximum)
        above = f" && duration(self) >= duration('{least}')" if self.minimum else ""
        bounds = f"between {least} and {most}" if self.minimum else f"of at most {most}"
        rule = Rule(
            cel="self.matches('^(0|([0-9]{1,9}([.][0-9]{1,9})?(ms|h|m|s))+)$')"
            f"{above} && duration(self) <= duration('{most}')",
            message=f'must be a duration {bounds}, such as "90s", "500ms" or "1h30m"',
        )
        return {"type": "string", "maxLength": 40, "x-kubernetes-validations": [rule.schema]}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        value = document.raw(name)
        if value is None:
            return default
        seconds = parse_duration_seconds(value) if isinstance(value, str) else None
        if seconds is None:
            document.problem(name, f'must be a duration such as "90s", "500ms" or "1h30m", got {shown(value)}')
        elif seconds < self.minimum:
            document.problem(name, f"must be >= {format_duration(self.minimum)}, got {shown(value)}")
        elif seconds > self.maximum:
            document.problem(name, f"must be <= {format_duration(self.maximum)}, got {shown(value)}")
        else:
            return seconds
        return default

    def in_yaml(self, value: Any) -> str:
        return f"{value:g}s"

    def arguments(self, value: Any) -> list[str]:
        return Kind.arguments(self, None if value is None else f"{value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSize(Kind):
    """An amount of memory such as 4Gi, read as bytes."""

    unit: ClassVar[str] = "_bytes"
    minimum: int = 1

    def schema(self, value_type: Any) -> JSON:
        return quantity_schema()

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        value = document.raw(name)
        if value is None:
            return default
        size = parse_bytes(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
        if size is None or size < self.minimum:
            document.problem(name, f'must be an amount of memory such as "4Gi" or "512Mi", got {shown(value)}')
            return default
        return size

    def arguments(self, value: Any) -> list[str]:
        return Kind.arguments(self, value or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOrPercent(Kind):
    """A whole number, or a percentage such as "25%", which Kubernetes rounds itself."""

    def schema(self, value_type: Any) -> JSON:
        rule = Rule(
            cel="type(self) == int ? self >= 0 : self.matches('^(100|[1-9]?[0-9])%$')",
            message='must be a whole number of at least 0 or a percentage up to 100 such as "25%"',
        )
        either = [{"type": "integer"}, {"type": "string"}]
        rules = {"x-kubernetes-validations": [rule.schema]}
        return {"x-kubernetes-int-or-string": True, "anyOf": either, "maxLength": 10, **rules}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        value = document.raw(name)
        if not isinstance(value, str):
            return document.integer(name, default=default)
        if _PERCENT.fullmatch(value) is None:
            message = f'must be a whole number or a percentage up to 100 such as "25%", got {shown(value)}'
            document.problem(name, message)
            return default
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOn(Kind):
    """A mapping of any content, which is passed on as it is."""

    def schema(self, value_type: Any) -> JSON:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        return document.mapping(name)


def quantity_schema() -> JSON:
    rule = Rule(
        cel="isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0",
        message='must be a quantity such as 1, "500m" or "16Gi"',
    )
    return {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 32,
        "x-kubernetes-validations": [rule.schema],
    }
