"""The sampling parameters of requests, through the sampler."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from quire_parity.batches import batch
from torch import Tensor

from quire_engine.core.batch import Admission, TokenLogprobs, TokenMasks, mask_bytes
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.accelerator import make_accelerator
from quire_engine.runner.logprobs import spread
from quire_engine.runner.passes import StagedPass
from quire_engine.runner.sampler import Sampler
from quire_engine.runner.staging import HostToDeviceBatch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
VOCABULARY = 40
ALONE = tuple((token, -1000.0) for token in range(VOCABULARY) if token not in (4, 5, 6))
"""A bias that leaves three tokens."""


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


@dataclass(frozen=True, slots=True)
class Drawn:
    token_ids: np.ndarray
    logprobs: list[TokenLogprobs | None] | None


class Drawing:
    """A sampler, and the part of a step around it."""

    def __init__(self, *admissions: Admission, max_rows: int = 8, vocabulary: int = VOCABULARY) -> None:
        self.sampler = Sampler(max_rows=max_rows, most_draws=max_rows, vocab_size=vocabulary, device=DEVICE)
        self.admitted = list(admissions)

    def draw(self, logits: Tensor, rows: list[int], position: int = 5, masks: TokenMasks | None = None) -> Drawn:
        accelerator = make_accelerator(DEVICE)
        transfer = HostToDeviceBatch(accelerator)
        own, positions = transfer.add(np.array(rows)), transfer.add(np.full(len(rows), position))
        step = batch(admitted=self.admitted, released_rows=[admission.row for admission in self.admitted])
        plan = self.sampler.stage(step, np.array(rows), transfer)
        self.admitted = []
        transfer.send()
        self.sampler.apply()
        staged = StagedPass(
            token_ids=own.on_device, drawn_rows=own.on_device, drawn_positions=positions.on_device, drawn_lines=None
        )
        token_ids, found = self.sampler.draw(logits.to(DEVICE), staged, plan, masks)
        report = None if found is None else found.download(accelerator)
        accelerator.mark().wait()
        places = None if plan.reported is None else plan.reported.places.array
        return Drawn(token_ids.cpu().numpy(), None if places is None else spread(report, places, plan.count))


def sampler(*admissions: Admission) -> Drawing:
    return Drawing(*admissions)


def draw(here: Drawing, logits: Tensor, rows: list[int], position: int = 5) -> Drawn:
    return here.draw(logits, rows, position)


def peaked(*tokens: int) -> Tensor:
    """Return one row of logits in which these tokens lead, each 1 above the next (3, 2, 1 and so on)."""
    logits = torch.zeros(1, VOCABULARY)
    for height, token in enumerate(reversed(tokens), start=1):
        logits[0, token] = height
    return logits


def first(here: Drawing, logits: Tensor) -> int:
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
def test_logits_are_shaped_by_sampling_parameters(admitted: Admission, logits: Tensor, token: int) -> None:
    assert first(sampler(admitted), logits) == token


def test_repetition_penalty_lowers_negative_logits_further() -> None:
    here = sampler(admission(repetition_penalty=2.0, prompt=[4]))
    logits = torch.full((1, VOCABULARY), -3.0)
    logits[0, 4], logits[0, 5] = -2.0, -2.5
    assert first(here, logits) == 5


def test_penalties_follow_sampled_tokens() -> None:
    here = sampler(admission(presence_penalty=1.5))
    assert [first(here, peaked(4, 5, 6)) for _ in range(4)] == [4, 5, 4, 4]


def test_many_different_tokens_are_followed() -> None:
    here = sampler(admission(presence_penalty=50.0, prompt=list(range(30))))
    drawn = [first(here, torch.arange(VOCABULARY).float().unsqueeze(0)) for _ in range(VOCABULARY)]
    assert drawn == list(reversed(range(VOCABULARY)))


def test_min_tokens_stops_applying_when_reached() -> None:
    here = sampler(admission(min_tokens=2))
    assert [first(here, peaked(7, 5)) for _ in range(3)] == [5, 5, 7]


def test_reused_row_has_no_state_of_its_previous_sequence() -> None:
    here = sampler(admission(logit_bias=((5, 9.0),), logprobs=1))
    here.admitted = [admission()]
    drawn = draw(here, peaked(4, 5), [0])
    assert (int(drawn.token_ids[0]), drawn.logprobs) == (4, None)


def test_rows_without_settings_stay_unchanged() -> None:
    here = sampler(admission(0), admission(1, logit_bias=((5, 9.0),)), admission(2))
    assert draw(here, peaked(4, 5).repeat(3, 1), [2, 1, 0]).token_ids.tolist() == [4, 5, 4]


def test_same_seed_samples_the_same_tokens_in_any_batch() -> None:
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


def test_seeds_and_positions_change_the_sample() -> None:
    flat = torch.zeros(1, VOCABULARY)
    by_seed = {first(sampler(admission(temperature=1.0, seed=seed)), flat) for seed in range(50)}
    here = sampler(admission(temperature=1.0))
    by_position = {int(draw(here, flat.clone(), [0], position).token_ids[0]) for position in range(50)}
    assert len(by_seed) > 15 and len(by_position) > 15


@pytest.mark.parametrize(
    ("params", "likely"),
    [
        # The token is forbidden before all other rules; a bias does not allow it again.
        ({"allowed_token_ids": (5, 6), "logit_bias": ((4, 100.0),)}, {5, 6}),
        ({"bad_words_token_ids": ((4,),), "logit_bias": ((4, 100.0), *ALONE)}, {5, 6}),
        # A bias is added before penalties apply: 4's (3 + 9) / 12 is then less than 5's 2.
        ({"logit_bias": ((4, 9.0),), "repetition_penalty": 12.0, "top_k": 1}, {5}),
        # The temperature comes before min_p: at 4 all three are within a factor of 2 of the likeliest, at 1 one is.
        ({"min_p": 0.5, "temperature": 4.0, "logit_bias": ALONE}, {4, 5, 6}),
        ({"min_p": 0.5, "temperature": 1.0, "logit_bias": ALONE}, {4}),
        # top_p applies to what top_k leaves: 0.7 of (0.73, 0.27) is the first alone, of (0.67, 0.24, 0.09) two.
        ({"top_k": 2, "top_p": 0.7, "logit_bias": ALONE}, {4}),
        ({"top_p": 0.7, "logit_bias": ALONE}, {4, 5}),
        # typical_p comes last: of all 40 tokens the third is the most typical, of those that top_k leaves the first.
        ({"typical_p": 0.01}, {6}),
        ({"top_k": 3, "typical_p": 0.01}, {4}),
    ],
    ids=str,
)
def test_operations_have_an_order(params: dict[str, Any], likely: set[int]) -> None:
    asked = admission(prompt=[4], **{"temperature": 1.0, **params})
    drawn = {int(draw(sampler(asked), peaked(4, 5, 6), [0], position).token_ids[0]) for position in range(200)}
    assert drawn == likely


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((3, 1.5), (4, -2.0))},
        {"allowed_token_ids": (1, 3, 5, 7, 9)},
        {"bad_words_token_ids": ((1,), (2, 3), (9, 4))},
        {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"min_tokens": 5, "stop_token_ids": (0, 1)},
    ],
    ids=str,
)
def test_frequencies_follow_the_shaped_distribution(params: dict[str, Any]) -> None:
    rows, vocabulary, drawn = 4000, 12, [9, 2, 2]
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3))
    asked = SamplingParams(max_tokens=9, **params)
    admitted = [
        Admission(row=row, prompt_token_ids=[5], output_token_ids=drawn, params=asked, seed=row, eos_token_ids=(7,))
        for row in range(rows)
    ]
    here = Drawing(*admitted, max_rows=rows, vocabulary=vocabulary)
    tokens = draw(here, logits.repeat(rows, 1), list(range(rows))).token_ids
    # The expected logits of the rows above, by hand.
    made = logits.clone()
    if "allowed_token_ids" in params:
        made[[token for token in range(vocabulary) if token not in params["allowed_token_ids"]]] = -math.inf
    if "bad_words_token_ids" in params:
        made[[1, 3]] = -math.inf  # 3 follows a 2; the last token was not 9
    if "min_tokens" in params:
        made[[0, 1, 7]] = -math.inf
    for token, bias in params.get("logit_bias", ()):
        made[token] += bias
    if "repetition_penalty" in params:
        for token in (5, 9, 2):
            made[token] = made[token] / 1.8 if made[token] > 0 else made[token] * 1.8
        made[9] -= 0.5 + 0.25
        made[2] -= 0.5 + 2 * 0.25
    expected = rows * made.softmax(dim=-1)
    counts = torch.from_numpy(np.bincount(tokens, minlength=vocabulary))
    kept = expected > 0
    assert counts[~kept].sum() == 0
    # 99.99 % of chi-square's mass is below this at 11 degrees of freedom, and below less at fewer.
    assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < 37.4


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_k": 2, "top_p": 1.0}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_filters_keep_the_most_likely_tokens(params: dict[str, Any]) -> None:
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


def test_sixteen_bit_logits_can_be_sampled() -> None:
    here = sampler(admission(0), admission(1, temperature=1.0, top_k=1))
    logits = peaked(4, 5).repeat(2, 1).bfloat16()
    assert draw(here, logits, [0, 1]).token_ids.tolist() == [4, 4]
    assert draw(here, logits[:1], [0]).token_ids.tolist() == [4]


def masks(**allowed: Any) -> TokenMasks:
    """Return masks; ``row2=[4, 5]`` is that of the third sampled sequence."""
    words = [sum(1 << token for token in tokens) for tokens in allowed.values()]
    return TokenMasks(
        places=[int(name.removeprefix("row")) for name in allowed],
        bits=b"".join(word.to_bytes(mask_bytes(VOCABULARY), "little") for word in words),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shaped", [{}, {"presence_penalty": 1.0}, {"logit_bias": ((9, 50.0),)}])
def test_masked_rows_sample_allowed_tokens_only(temperature: float, shaped: dict[str, Any]) -> None:
    admissions = [admission(row, temperature=temperature, logprobs=1, **shaped) for row in range(3)]
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    free = draw(sampler(*admissions), logits.clone(), [0, 1, 2])
    allowed = masks(row2=[39], row0=[4, 5, 33])
    here = sampler(*admissions).draw(logits.clone(), [0, 1, 2], masks=allowed)
    assert here.token_ids[1] == free.token_ids[1], "others take any token"
    assert here.token_ids[0] in (4, 5, 33) and here.token_ids[2] == 39
    raw = torch.log_softmax(logits, dim=1)
    assert here.logprobs is not None
    for row, entry in enumerate(here.logprobs):
        assert entry is not None and entry.logprobs[0] == pytest.approx(float(raw[row, here.token_ids[row]]), abs=1e-5)


def test_mask_that_allows_all_changes_nothing() -> None:
    admissions = [admission(row, temperature=0.8, top_p=0.9) for row in range(2)]
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(4))
    every = masks(row0=range(VOCABULARY), row1=range(VOCABULARY))
    free = draw(sampler(*admissions), logits.clone(), [0, 1])
    same = sampler(*admissions).draw(logits.clone(), [0, 1], masks=every)
    assert same.token_ids.tolist() == free.token_ids.tolist()
