"""A reader of typed fields of a config.json, which records each problem and continues with a harmless value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

_SHOWN_CHARACTERS = 160
_MAX_INT = 2**31 - 1
"""Authors of configs are unknown: no size may make arithmetic slow."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of ``raw``. The value that a getter returns after a problem only helps to find further problems."""

    raw: Mapping[str, Any]
    problems: list[str]
    prefix: str = ""

    def positive_int(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is int and 0 < value <= (most or _MAX_INT):
            return value
        is_bounded = most is not None or (type(value) is int and value > _MAX_INT)
        right = f"1 to {most or _MAX_INT} is needed" if is_bounded else "a whole number above 0 is needed"
        self._note(name, value, right)
        return 1

    def natural_int(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is int and 0 <= value <= _MAX_INT:
            return value
        self._note(name, value, "a whole number, 0 or more, is needed")
        return 0

    def section(self, name: str) -> "Fields":
        """Return the fields of a nested object, which is empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            self._note(name, value, "an object is needed")
            value = {}
        return Fields(value, self.problems, f"{self.prefix}{name}.")

    def layer_types(self, layers: int, kinds: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
        """Return the kind of attention of each layer; an empty tuple if ``layer_types`` is absent."""
        value = self.raw.get("layer_types")
        if value is None:
            return ()
        if isinstance(value, list) and len(value) == layers and all(kind in kinds for kind in value):
            return tuple(value)
        self._note("layer_types", value, f"a list of {layers} of {', '.join(kinds)} is needed")
        return ()

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if _is_number(value) and value > 0:
            return float(value)
        self._note(name, value, "a number above 0 is needed")
        return 1.0

    def positive_floats(self, name: str) -> tuple[float, ...]:
        value = self.raw.get(name)
        if isinstance(value, list) and all(_is_number(item) and item > 0 for item in value):
            return tuple(float(item) for item in value)
        self._note(name, value, "a list of numbers above 0 is needed")
        return ()

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """Return integers from 0 to ``count`` - 1; an empty tuple if the field is absent."""
        value = self._get(name, [])
        if isinstance(value, list) and all(type(item) is int and 0 <= item < count for item in value):
            return tuple(value)
        self._note(name, value, f"a list of whole numbers from 0 to {count - 1} is needed")
        return ()

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        self._note(name, value, "true or false is needed")
        return default

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self._get(name, default)
        if isinstance(value, str) and value in choices:
            return value
        self._note(name, value, f"supported: {', '.join(choices)}")
        return default

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def _note(self, name: str, value: Any, right: str) -> None:
        shown = repr(value) if len(repr(value)) <= _SHOWN_CHARACTERS else f"{repr(value)[:_SHOWN_CHARACTERS]}…"
        problem = f"{self.prefix}{name} {'is missing' if value is None else f'is {shown}'}; {right}"
        # A field that is read twice, for example for a layer and for its experts, has one problem.
        if problem not in self.problems:
            self.problems.append(problem)


def _is_number(value: Any) -> bool:
    """Return whether the value is a finite number; Python's JSON parser accepts NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
