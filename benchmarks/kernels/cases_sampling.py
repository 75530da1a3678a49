"""The cases of sampling tokens, at Llama 3.1's vocabulary, and the mixture of experts at Mixtral's sizes.

Legend: B rows, V vocabulary, T tokens, H hidden size, I intermediate size, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.kernel_cases import Case, Prepared, Result
from quire_kernels.logprobs import Logprobs, token_logprobs
from quire_kernels.logprobs import reference as logprobs_reference
from quire_kernels.sampling import greedy, sample
from quire_kernels.sampling import reference as sampling_reference

_VOCABULARY = 128_256
_COMPARED_ROWS = 8
"""The rows of sampling that are compared: its reference sorts one row at a time."""


def cases() -> list[Case]:
    return [
        _greedy(32),
        _sample(1, "temperature"),
        _sample(32, "temperature", quick=True),
        _sample(32, "top-p 0.9, top-k 50", top_p=0.9, top_k=50),
        _sample(256, "temperature"),
        _sample(256, "top-p 0.9, top-k 50", top_p=0.9, top_k=50),
        _logprobs(32, 5),
    ]


def tiny_cases() -> list[Case]:
    return [
        _greedy(3, vocabulary=700),
        _sample(3, "temperature", vocabulary=700),
        _sample(3, "top-p 0.9, top-k 50", top_p=0.9, top_k=50, vocabulary=700),
        _logprobs(3, 5, vocabulary=700),
    ]


def _logits(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    return torch.randn(rows, vocabulary, device=device) * 3.0


def _greedy(rows: int, *, vocabulary: int = _VOCABULARY) -> Case:
    def prepare(device: torch.device, _dtype: torch.dtype) -> Prepared:
        logits = _logits(rows, vocabulary, device)
        return Prepared(
            call=lambda: greedy(logits),
            expected=lambda: sampling_reference.greedy(logits),
            exact=True,
            bytes=logits.nbytes,
            peers={"torch": lambda: logits.argmax(dim=-1)},
        )

    return Case(op="sampling", name=f"greedy {rows:,} x {vocabulary:,}", prepare=prepare)


def _sample(
    rows: int,
    what: str,
    *,
    top_p: float = 1.0,
    top_k: int | None = None,
    vocabulary: int = _VOCABULARY,
    quick: bool = False,
) -> Case:
    def prepare(device: torch.device, _dtype: torch.dtype) -> Prepared:
        logits = _logits(rows, vocabulary, device)

        def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        options: dict[str, Any] = {
            "temperature": filled(0.8),
            "top_k": filled(top_k or vocabulary, torch.int64),
            "top_p": filled(top_p),
            "min_p": filled(0.0),
            "typical_p": filled(1.0),
            "seeds": torch.arange(rows, device=device),
            "positions": torch.arange(rows, device=device) + 100,
        }
        some = {name: value[:_COMPARED_ROWS] for name, value in options.items()}
        on_host = {name: value.cpu() for name, value in some.items()}

        def in_torch() -> Tensor:
            scaled = logits / 0.8
            if top_k is not None:
                values, ids = scaled.topk(top_k, dim=-1)
                below = values.softmax(dim=-1).cumsum(dim=-1) - values.softmax(dim=-1)
                chosen = values.masked_fill(below >= top_p, -torch.inf).softmax(dim=-1).multinomial(1)
                return ids.gather(1, chosen)[:, 0]
            return scaled.softmax(dim=-1).multinomial(1)[:, 0]

        return Prepared(
            call=lambda: sample(logits, **options),
            result=lambda: sample(logits[:_COMPARED_ROWS], **some),
            expected=lambda: sampling_reference.sample(logits[:_COMPARED_ROWS].cpu(), **on_host),
            exact=True,
            bytes=logits.nbytes,
            peers={"torch": in_torch},
            compare_peers=False,
        )

    return Case(op="sampling", name=f"{what}, {rows:,} x {vocabulary:,}", prepare=prepare, quick=quick)


def _logprobs(rows: int, most: int, *, vocabulary: int = _VOCABULARY) -> Case:
    def prepare(device: torch.device, _dtype: torch.dtype) -> Prepared:
        logits = _logits(rows, vocabulary, device)
        lines = torch.arange(rows, device=device)
        token_ids = torch.randint(vocabulary, (rows,), device=device)

        def flat(found: Logprobs) -> Result:
            return [found.of_token[:, None], found.rank[:, None].float(), found.token_ids.float(), found.logprobs]

        return Prepared(
            call=lambda: token_logprobs(logits, lines, token_ids, most),
            compared=flat,
            expected=lambda: flat(logprobs_reference.token_logprobs(logits, lines, token_ids, most)),
            bytes=logits.nbytes,
        )

    return Case(op="logprobs", name=f"{rows:,} x {vocabulary:,}, {most} likeliest", prepare=prepare)
