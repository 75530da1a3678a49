"""Edits of rows through admissions, samples and releases always match the request; on a GPU if there is one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.batch import Admission
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.accelerator import make_accelerator
from quire_engine.runner.logit_shaping import LogitShaping, row_edits
from quire_engine.runner.staging import HostToDeviceBatch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
VOCABULARY = 30
ROWS = 4
EOS = 7


def admission(params: SamplingParams, *, row: int = 0, prompt: list[int], drawn: list[int]) -> Admission:
    return Admission(
        row=row, prompt_token_ids=prompt, output_token_ids=drawn, params=params, seed=0, eos_token_ids=(EOS,)
    )


def change(shaping: LogitShaping, rows: np.ndarray | tuple[()] = (), admitted: tuple[Admission, ...] = ()) -> None:
    """Stage and apply admissions, and room for the tokens that ``rows`` sample."""
    transfer = HostToDeviceBatch(make_accelerator(DEVICE))
    shaping.stage(admitted, np.asarray(rows, dtype=np.int64), transfer)
    transfer.send()
    shaping.apply()


def on_device(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(DEVICE)


def shape(shaping: LogitShaping, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Return the logits after the edits of ``rows``, one line each."""
    logits, lines = logits.to(DEVICE), on_device(np.arange(len(rows)))
    shaping.shape(logits, lines, on_device(rows))
    return logits.cpu()


def expected(logits: list[float], params: SamplingParams, prompt: list[int], drawn: list[int]) -> list[float]:
    """Return the logits after the documented effect of each parameter, token by token."""
    made = []
    for token, logit in enumerate(logits):
        value = logit
        forbidden = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for *before, last in params.bad_words_token_ids:
            forbidden |= token == last and drawn[len(drawn) - len(before) :] == before and len(drawn) >= len(before)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        forbidden |= len(drawn) < params.min_tokens and token in stops
        value += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in drawn:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * drawn.count(token)
        value -= params.presence_penalty * (token in drawn)
        made.append(-np.inf if forbidden else value)
    return made


tokens = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 1.5]), max_size=3).map(lambda it: tuple(it.items())),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=9).map(tuple),
    bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 3),
)


class Sequence:
    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self.params, self.prompt, self.drawn = params, prompt, list[int]()


@given(st.data())
def test_rows_keep_their_own_logit_edits_in_any_order(data: st.DataObject) -> None:
    shaping = LogitShaping(max_rows=ROWS, vocab_size=VOCABULARY, device=DEVICE)
    running: dict[int, Sequence] = {}
    chance = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(3, 12))):
        row = data.draw(st.integers(0, ROWS - 1))
        match data.draw(st.sampled_from(["admit", "admit", "preempt", "release"])):
            case "admit":
                running[row] = Sequence(data.draw(params), data.draw(st.lists(tokens, min_size=1, max_size=8)))
            case "preempt" if running:  # removed, and admitted again in another row
                row, sequence = row, running.pop(data.draw(st.sampled_from(sorted(running))))
                running[row] = sequence
            case "release":
                running.pop(row, None)
                shaping.release(row)
        if row in running:
            it = running[row]
            change(shaping, admitted=(admission(it.params, row=row, prompt=it.prompt, drawn=list(it.drawn)),))
        rows = np.array(sorted(running), dtype=np.int64)
        for _ in range(data.draw(st.integers(0, 5)) if running else 0):
            step(shaping, running, rows, chance)


def step(shaping: LogitShaping, running: dict[int, Sequence], rows: np.ndarray, chance: np.random.Generator) -> None:
    logits = torch.from_numpy(chance.normal(size=(len(rows), VOCABULARY)).astype(np.float32))
    wanted = [expected(logits[i].tolist(), running[row].params, running[row].prompt, running[row].drawn)
              for i, row in enumerate(rows.tolist())]  # fmt: skip
    change(shaping, rows)
    places = shaping.shaped(rows)
    logits[places] = shape(shaping, logits[places], rows[places])
    torch.testing.assert_close(logits, torch.tensor(wanted).view(logits.shape), rtol=1e-5, atol=1e-5)
    drawn = chance.integers(VOCABULARY, size=len(rows))
    shaping.count(on_device(drawn[places]), on_device(rows[places]))
    for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
        running[row].drawn.append(token)


def test_long_output_outgrows_its_pool_entry_repeatedly() -> None:
    vocabulary = 3000
    shaping = LogitShaping(max_rows=3, vocab_size=vocabulary, device=DEVICE)
    asked = SamplingParams(max_tokens=1, presence_penalty=1.0)
    change(shaping, admitted=tuple(admission(asked, row=row, prompt=[row], drawn=[]) for row in range(3)))
    rows = np.arange(3)
    for token in range(2000):
        for sampled in (token, 0):
            change(shaping, rows)
            shaping.count(on_device(np.full(3, sampled)), on_device(rows))
    logits = shape(shaping, torch.zeros(3, vocabulary), rows)
    assert (logits[:, :2000] == -1).all() and (logits[:, 2000:] == 0).all()


def test_released_rows_free_the_pool() -> None:
    shaping = LogitShaping(max_rows=2, vocab_size=VOCABULARY, device=DEVICE)
    asked = SamplingParams(max_tokens=1, repetition_penalty=1.5)
    for number in range(5000):
        change(shaping, admitted=(admission(asked, row=number % 2, prompt=[number % VOCABULARY], drawn=[]),))
    assert shaping._capacity <= 4096


@pytest.mark.parametrize(
    "change",
    [{"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.2}, {"min_tokens": 1},
     {"logit_bias": ((1, 1.0),)}, {"bad_words_token_ids": ((1,),)}, {"allowed_token_ids": (1,)}],
    ids=str,
)  # fmt: skip
def test_only_rows_with_such_parameters_have_edits(change: dict[str, Any]) -> None:
    plain = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.5, seed=3, logprobs=2, stop_token_ids=(4,))
    assert row_edits(admission(plain, prompt=[1], drawn=[]), VOCABULARY) is None
    asking = SamplingParams(max_tokens=5, **change)
    assert row_edits(admission(asking, prompt=[1], drawn=[]), VOCABULARY) is not None


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    shaping = LogitShaping(max_rows=1, vocab_size=5, device=DEVICE)
    asked = SamplingParams(
        max_tokens=5,
        min_tokens=1,
        logit_bias=((9, 1.0), (2, 1.0)),
        allowed_token_ids=(2, 3, 9),
        bad_words_token_ids=((9,), (9, 3)),
        stop_token_ids=(9,),
    )
    asked = replace(asked, presence_penalty=0.5)
    change(shaping, admitted=(admission(asked, prompt=[1, 2, 9], drawn=[]),))
    assert shape(shaping, torch.zeros(1, 5), np.array([0])).tolist() == [[-np.inf, -np.inf, 1.0, 0.0, -np.inf]]
