"""The search for a kernel's best parameters: one after the other, through its values, until no change helps.

A function provides the time of a configuration, and earlier results are remembered. No GPU is used here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Parameters = Mapping[str, int]
Score = Callable[[Parameters], float | None]
"""A function from parameters to seconds; None if the configuration cannot be used."""

WORTH = 0.98
"""The least gain, as a share of the default's time; a smaller gain is noise, and the default stays."""


@dataclass(frozen=True, kw_only=True)
class Found:
    best: Parameters
    seconds: float | None
    default_seconds: float | None
    finished: bool
    """False if the time limit came first; the result is the best so far."""

    @property
    def worth_writing(self) -> bool:
        if self.seconds is None:
            return False
        return self.default_seconds is None or self.seconds < WORTH * self.default_seconds


def search(
    space: Mapping[str, tuple[int, ...]], default: Parameters, score: Score, time_is_up: Callable[[], bool]
) -> Found:
    """Search from ``default``. An unusable configuration is never the best, not even the default."""
    best, seconds = dict(default), score(default)
    default_seconds = seconds
    improved = True
    while improved:
        improved = False
        for name, values in space.items():
            for value in values:
                if value == best[name]:
                    continue
                if time_is_up():
                    return Found(best=best, seconds=seconds, default_seconds=default_seconds, finished=False)
                candidate = {**best, name: value}
                found = score(candidate)
                if found is not None and (seconds is None or found < seconds):
                    best, seconds, improved = candidate, found, True
    return Found(best=best, seconds=seconds, default_seconds=default_seconds, finished=True)


@dataclass
class Trials:
    """The trials so far, stored in a file, so that an interrupted search continues."""

    path: Path
    machine: Mapping[str, Any]
    seconds: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    """The trials by kernel, key, and parameters as one line of JSON."""

    @classmethod
    def read(cls, path: Path, machine: Mapping[str, Any]) -> "Trials":
        """Read the trials; those of another machine or other versions are ignored."""
        if not path.is_file():
            return cls(path=path, machine=machine)
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["machine"] != machine:
            return cls(path=path, machine=machine)
        return cls(path=path, machine=machine, seconds=content["seconds"])

    def remembered(self, kernel: str, key: str, score: Score) -> Score:
        """Return a ``score`` that calls the given one only once for each configuration, over all runs."""
        known = self.seconds.setdefault(kernel, {}).setdefault(key, {})

        def ask(parameters: Parameters) -> float | None:
            line = json.dumps(dict(sorted(parameters.items())))
            if line not in known:
                known[line] = score(parameters)
                self.write()
            return known[line]

        return ask

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".new")
        content = {"machine": self.machine, "seconds": self.seconds}
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


_BY_SHARE = (
    "paged_attention.split",
    "linear",
    "moe.gate_up",
    "moe.down",
    "paged_attention",
    "rms_norm",
    "store_kv",
    "activation",
    "sampling",
)


def by_share(kernel_and_key: tuple[str, str]) -> tuple[int, str, str]:
    """Return an order by the usual share of a served step: a run that ends early has then tuned what matters most."""
    kernel, key = kernel_and_key
    places = (place for place, name in enumerate(_BY_SHARE) if kernel == name or kernel.startswith(f"{name}."))
    return next(places, len(_BY_SHARE)), kernel, key


def merged(table: Mapping[str, Any] | None, kernel: str, key: str, parameters: Parameters) -> dict[str, Any]:
    """Return a device's table with one more configuration; the others stay."""
    table = table or {}
    kernels = {name: dict(by_key) for name, by_key in table.get("kernels", {}).items()}
    kernels.setdefault(kernel, {})[key] = dict(parameters)
    return {**table, "kernels": {name: dict(sorted(kernels[name].items())) for name in sorted(kernels)}}
