"""The allowed excess of measures over the recorded ones in ``tests/engine/guard/bounds.json``.

Counts hardly vary, but differ a little between versions of Python: half as much again is too much for any. Ratios of
times differ between CPUs, so only two and a half times as much is certainly a regression. Lower values are fine: ``make
guard-update`` then tightens the bounds.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "engine" / "guard" / "bounds.json"
RENEW = "make guard-update"

Measures = Mapping[str, Mapping[str, float]]
"""The measures by kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    factor: float
    other_python: float
    """The factor if the version of Python is not the recorded one."""
    slack: float
    """An allowance beyond the factor, for recorded values near zero."""

    def most(self, recorded: float, *, same_python: bool) -> float:
        return recorded * (self.factor if same_python else self.other_python) + self.slack


ALLOWED = {
    "exact": Allowance(factor=1.0, other_python=1.5, slack=0.0),
    "counts": Allowance(factor=1.1, other_python=1.5, slack=0.5),
    "amounts": Allowance(factor=1.5, other_python=1.5, slack=16.0),
    "ratios": Allowance(factor=2.5, other_python=2.5, slack=0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    python: str
    measures: Measures


def python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def read(file: Path = FILE) -> Recorded:
    content = json.loads(file.read_text(encoding="utf-8"))
    return Recorded(python=content.pop("python"), measures=content)


def write(measures: Measures, file: Path = FILE) -> None:
    rounded = {kind: {name: round(value, 3) for name, value in of.items()} for kind, of in measures.items()}
    file.write_text(json.dumps({"python": python_version(), **rounded}, indent=1) + "\n", encoding="utf-8")


def names(measures: Measures) -> list[tuple[str, str]]:
    """Return kind and name of each."""
    return [(kind, name) for kind, of in measures.items() for name in of]


def excess(kind: str, name: str, found: float, recorded: Recorded) -> str | None:
    """Return why this measure is too large, or None."""
    before = recorded.measures.get(kind, {}).get(name)
    if before is None:
        return f"{name}: {found:.6g} has no bound yet; {RENEW} records one"
    most = ALLOWED[kind].most(before, same_python=recorded.python == python_version())
    if found <= most + 1e-3:
        return None
    return (
        f"{name}: it grew from {before:.6g} to {found:.6g}, and at most {most:.6g} is allowed. Where that is meant,"
        f" {RENEW} records what it is now ({FILE.name}), and the reason belongs into the commit"
    )
