"""Time each op of a loaded model from outside, so that the engine has no timing code beyond its own metrics.

An op is a function of the kernels that ``model.layers`` calls, or a linear layer of the model; the rest of a step's run
is Python and dispatch. The calls of a step can be recorded and repeated.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, cast

from quire_engine.core.ports import LoadedModel

OP_PARTS = {
    "linear": "linear",
    "paged_attention": "attention",
    "store_kv": "store keys, values",
    "rms_norm": "norms",
    "silu_and_mul": "activation",
    "gelu_tanh_and_mul": "activation",
}
"""The part to which a function belongs; a function that is not listed is a separate part."""

Call = Callable[[], object]


class Probes:
    """The seconds of each part since ``clear``, while ``attached``. An op that calls other ops includes their time."""

    def __init__(self, model: LoadedModel) -> None:
        self._runner = cast(Any, model.runner)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = False
        self._calls: dict[str, list[Call]] | None = None

    def clear(self) -> None:
        self._seconds.clear()

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    @contextmanager
    def attached(self) -> Iterator[None]:
        from quire_engine.model import layers

        plain_model = self._runner._model
        plain_ops = {
            name: value
            for name, value in vars(layers).items()
            if callable(value) and not isinstance(value, type) and value.__module__.startswith("quire_kernels.")
        }
        try:
            for name, op in plain_ops.items():
                setattr(layers, name, self._timed(OP_PARTS.get(name, name), op))
            self._runner._model = with_linears(plain_model, lambda linear: self._timed("linear", linear))
            yield
        finally:
            self._runner._model = plain_model
            for name, op in plain_ops.items():
                setattr(layers, name, op)

    @contextmanager
    def recording(self) -> Iterator[dict[str, list[Call]]]:
        """Record the calls of each part with their arguments, so that they can be repeated."""
        self._calls = {}
        try:
            yield self._calls
        finally:
            self._calls = None

    def _timed(self, part: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return op(*args, **kwargs)
            if self._calls is not None:
                self._calls.setdefault(part, []).append(lambda: op(*args, **kwargs))
            self._inside = True
            began = perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                self._seconds[part] += perf_counter() - began
                self._inside = False

        return timed


def with_linears(node: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return the same stack of layers with every linear layer changed."""
    if isinstance(node, tuple):
        return tuple(with_linears(item, change) for item in node)
    if type(node).__module__ == "quire_engine.model.layers":
        parts = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
        return dataclasses.replace(node, **{name: with_linears(part, change) for name, part in parts.items()})
    return change(node) if callable(node) else node
