"""Reads typed fields from a JSON object, noting each problem and going on with a harmless value."""

from dataclasses import dataclass
from typing import Any

_LAYER_TYPES = ("full_attention", "sliding_attention")


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

    def natural_int(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self._note(name, value, "a whole number, 0 or more, is needed")
        return 0

    def layer_types(self, layers: int) -> tuple[str, ...]:
        """The kind of attention of each layer; empty where ``layer_types`` is not given."""
        value = self.raw.get("layer_types")
        if value is None:
            return ()
        if isinstance(value, list) and len(value) == layers and all(kind in _LAYER_TYPES for kind in value):
            return tuple(value)
        self._note("layer_types", value, f"a list of {layers} of {', '.join(_LAYER_TYPES)} is needed")
        return ()

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
