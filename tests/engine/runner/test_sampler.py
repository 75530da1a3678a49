"""What requests may ask of the draw, through the sampler."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_engine.core.batch import Admission
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.sampler import Drawn, Sampler

VOCABULARY = 40


def admission(
    row: int = 0, *, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Admission:
    return Admission(
        row=row,
        prompt_token_ids=prompt or [1],
        output_token_ids=output or [],
        params=SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **params}),
        seed=params.get("seed") or 0,
        eos_token_ids=(7,),
    )


def sampler(*admissions: Admission) -> Sampler:
    made = Sampler(max_rows=8, vocab_size=VOCABULARY)
    for each in admissions:
        made.admit(each)
    return made


def draw(here: Sampler, logits: Tensor, rows: list[int], position: int = 5) -> Drawn:
    return here.draw(logits, np.array(rows), np.full(len(rows), position))


def peaked(*tokens: int) -> Tensor:
    """One row of logits in which the tokens lead, each 1 above the next: 3, 2, 1 …"""
    logits = torch.zeros(1, VOCABULARY)
    for height, token in enumerate(reversed(tokens), start=1):
        logits[0, token] = height
    return logits


def first(here: Sampler, logits: Tensor) -> int:
    return int(draw(here, logits.clone(), [0]).token_ids[0])


@pytest.mark.parametrize(
    ("admitted", "logits", "token"),
    [
        (admission(), peaked(4, 5), 4),
        (admission(logit_bias=((5, 1.5),)), peaked(4, 5), 5),
        (admission(logit_bias=((4, -math.inf),)), peaked(4, 5), 5),
        (admission(logit_bias=((1000, 9.0),)), peaked(4, 5), 4),
        (admission(min_tokens=1), peaked(7, 5), 5),
        (admission(min_tokens=1, stop_token_ids=(5,)), peaked(7, 5, 6), 6),
        (admission(min_tokens=1, ignore_eos=True), peaked(7, 5), 7),
        (admission(min_tokens=1, output=[3]), peaked(7, 5), 7),
        (admission(presence_penalty=1.5, output=[4]), peaked(4, 5), 5),
        (admission(presence_penalty=1.5, prompt=[4]), peaked(4, 5), 4),
        (admission(frequency_penalty=0.6, output=[4]), peaked(4, 5), 4),
        (admission(frequency_penalty=0.6, output=[4, 4]), peaked(4, 5), 5),
        (admission(repetition_penalty=3.0, prompt=[4]), peaked(4, 5), 5),
        (admission(repetition_penalty=3.0, output=[4]), peaked(4, 5), 5),
        (admission(repetition_penalty=0.3, prompt=[5]), peaked(4, 5), 5),
    ],
)
def test_a_request_shapes_its_own_logits(admitted: Admission, logits: Tensor, token: int) -> None:
    assert first(sampler(admitted), logits) == token


def test_a_repetition_penalty_makes_what_is_unlikely_less_likely() -> None:
    here = sampler(admission(repetition_penalty=2.0, prompt=[4]))
    logits = torch.full((1, VOCABULARY), -3.0)
    logits[0, 4], logits[0, 5] = -2.0, -2.5
    assert first(here, logits) == 5


def test_penalties_follow_what_is_drawn() -> None:
    here = sampler(admission(presence_penalty=1.5))
    assert [first(here, peaked(4, 5, 6)) for _ in range(4)] == [4, 5, 4, 4]


def test_many_different_tokens_are_followed() -> None:
    here = sampler(admission(presence_penalty=50.0, prompt=list(range(30))))
    drawn = [first(here, torch.arange(VOCABULARY).float().unsqueeze(0)) for _ in range(VOCABULARY)]
    assert drawn == list(reversed(range(VOCABULARY)))


def test_the_least_length_ends() -> None:
    here = sampler(admission(min_tokens=2))
    assert [first(here, peaked(7, 5)) for _ in range(3)] == [5, 5, 7]


def test_a_row_given_to_another_sequence_forgets_the_one_before() -> None:
    here = sampler(admission(logit_bias=((5, 9.0),), logprobs=1))
    here.admit(admission())
    drawn = draw(here, peaked(4, 5), [0])
    assert (int(drawn.token_ids[0]), drawn.logprobs) == (4, None)


def test_rows_that_ask_for_nothing_are_left_alone_beside_those_that_do() -> None:
    here = sampler(admission(0), admission(1, logit_bias=((5, 9.0),)), admission(2))
    assert draw(here, peaked(4, 5).repeat(3, 1), [2, 1, 0]).token_ids.tolist() == [4, 5, 4]


def test_the_same_seed_draws_the_same_tokens_whatever_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCABULARY)
    here = sampler(*(admission(row, temperature=1.0, seed=1000 + row) for row in range(6)))
    together = draw(here, logits.clone(), [0, 1, 2, 3, 4, 5]).token_ids
    swapped = draw(here, logits.flip(0).clone(), [5, 4, 3, 2, 1, 0]).token_ids
    alone = [int(draw(here, logits[row : row + 1].clone(), [row]).token_ids[0]) for row in range(6)]
    assert together.tolist() == swapped[::-1].tolist() == alone


@pytest.mark.parametrize("seed", [0, -1, 1 << 63, (1 << 64) - 1, 1 << 70])
def test_every_integer_is_a_seed(seed: int) -> None:
    here = sampler(admission(temperature=1.0, seed=seed))
    assert 0 <= first(here, torch.zeros(1, VOCABULARY)) < VOCABULARY


def test_seeds_and_positions_change_the_draw() -> None:
    flat = torch.zeros(1, VOCABULARY)
    by_seed = {first(sampler(admission(temperature=1.0, seed=seed)), flat) for seed in range(50)}
    here = sampler(admission(temperature=1.0))
    by_position = {int(draw(here, flat.clone(), [0], position).token_ids[0]) for position in range(50)}
    assert len(by_seed) > 15 and len(by_position) > 15


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_k": 2, "top_p": 1.0}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_filters_keep_the_likeliest(params: dict[str, Any]) -> None:
    here = sampler(admission(temperature=1.0, **params))
    logits = peaked(4, 5) * 5
    drawn = {int(draw(here, logits.clone(), [0], position).token_ids[0]) for position in range(200)}
    assert 4 in drawn and drawn <= {4, 5}


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert 0 <= first(sampler(admission(temperature=1.0, top_k=10_000)), torch.zeros(1, VOCABULARY)) < VOCABULARY


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCABULARY)
    here = sampler(
        admission(0),
        admission(1, logprobs=3, logit_bias=((9, 100.0),), temperature=0.5, top_k=2),
        admission(2, logprobs=0),
    )
    drawn = draw(here, logits.clone(), [0, 1, 2])
    assert drawn.logprobs is not None
    none, biased, plain = drawn.logprobs
    own = logits.log_softmax(dim=-1)
    assert none is None and biased is not None and plain is not None
    assert biased.token_ids == [9, *own[1].topk(3).indices.tolist()]
    assert biased.logprobs == pytest.approx([float(own[1, token]) for token in biased.token_ids])
    assert biased.rank == 1 + int((own[1] > own[1, 9]).sum())
    assert plain.token_ids == [int(logits[2].argmax())] and plain.rank == 1


def test_sixteen_bit_logits_are_drawn_from_too() -> None:
    here = sampler(admission(0), admission(1, temperature=1.0, top_k=1))
    logits = peaked(4, 5).repeat(2, 1).bfloat16()
    assert draw(here, logits, [0, 1]).token_ids.tolist() == [4, 4]
    assert draw(here, logits[:1], [0]).token_ids.tolist() == [4]
