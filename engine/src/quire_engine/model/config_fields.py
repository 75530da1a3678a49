"""Reads typed fields from a JSON object, noting each problem and going on with a harmless value."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """``raw``'s fields. What a getter returns after noting a problem only serves to find the next problem."""

    raw: dict[str, Any]
    problems: list[str]
    prefix: str = ""

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._note(name, value, "a whole number above 0 is needed")
        return 1

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self._note(name, value, "a number above 0 is needed")
        return 1.0

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
        state = "is missing" if value is None else f"is {value!r}"
        self.problems.append(f"{self.prefix}{name} {state}; {right}")
