"""Reaches into a loaded model from outside, so that the engine itself has no timing code beyond its own metrics: times
each op of a step, plays a step's linear layers and attention again alone, and puts a stand-in in the model's place.

An op is whatever ``model.layers`` calls of the kernels, and every linear layer that a model holds; what is left of a
step's run is Python and dispatch.
"""

import dataclasses
from collections import Counter
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
"""By function; one that is not here is a part of its own name."""

Call = Callable[[], object]


class Taps:
    """Seconds by part since ``clear``, while ``attached``. An op that calls others counts with them, once."""

    def __init__(self, model: LoadedModel) -> None:
        self._runner = cast(Any, model.runner)
        self._seconds: Counter[str] = Counter()
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
        """Also keeps each op's calls by part, with what they were given, to be made again."""
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
    """The same stack of layers, with every linear layer in it changed."""
    if isinstance(node, tuple):
        return tuple(with_linears(item, change) for item in node)
    if type(node).__module__ == "quire_engine.model.layers":
        parts = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        return dataclasses.replace(node, **{name: with_linears(part, change) for name, part in parts.items()})
    return change(node) if callable(node) else node


@contextmanager
def without_computing(model: LoadedModel) -> Iterator[None]:
    """Steps pass without a model: each token drawn is 0, and the KV cache keeps what it holds. For long prompts whose
    content does not matter."""
    import torch

    runner = cast(Any, model.runner)
    plain, vocab_size = runner._model, model.vocab_size

    def stand_in(inputs: Any, caches: Any) -> Any:
        return torch.zeros((len(inputs.logits_rows), vocab_size))

    runner._model = stand_in
    try:
        yield
    finally:
        runner._model = plain


def fill_kv_cache(model: LoadedModel) -> None:
    """With random numbers: memory that was never written is one page of zeros, and faster to read than any other."""
    import torch

    for cache in cast(Any, model.runner)._caches:
        for part in (cache.keys, cache.values):
            part.copy_(torch.randn(part.shape[1:]).expand(part.shape))
