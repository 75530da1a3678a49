"""Logits are shaped in Triton as in the reference, and tokens are counted."""

import dataclasses

import pytest
import torch
from logit_edits import Asked, edits_of

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.logit_shaping import TAIL, LogitEdits, count_tokens, kernel, reference, shape_logits

VOCABULARY = 301
ROWS = [
    Asked(),
    Asked(allowed=[0, 7, 300]),
    Asked(allowed=list(range(VOCABULARY))),
    Asked(words=[[5]]),
    Asked(words=[[5, 6], [4, 5, 9], [5, 1, 2]], drawn=[4, 5]),
    Asked(words=[[4, 5, 6], [4]], drawn=[5]),
    Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL)]),
    Asked(words=[[*range(TAIL), 49]], drawn=[9, *range(TAIL - 1)]),
    Asked(stops=[2, 3, 2], min_tokens=2, drawn=[1]),
    Asked(stops=[2, 3], min_tokens=1, drawn=[1]),
    Asked(biases={5: 3.0, 6: -1.0, 300: 100.0}, counted={5: 0, 6: 2, 300: 1}, penalties=(2.0, 0.25, 0.5)),
    Asked(counted={token: token % 3 for token in range(0, 300, 2)}, penalties=(1.3, -0.5, 0.1)),
    Asked(
        allowed=[1, 2, 3, 4],
        words=[[2]],
        stops=[3],
        min_tokens=1,
        biases={2: 100.0, 3: 100.0, 9: 100.0},
        counted={9: 4, 1: 1},
        penalties=(0.5, -2.0, -2.0),
    ),
]


def moved(edits: LogitEdits, device: torch.device) -> LogitEdits:
    fields = {field.name: getattr(edits, field.name).to(device, copy=True) for field in dataclasses.fields(edits)}
    return LogitEdits(**fields)


@pytest.mark.parametrize("share", [8192, 128], ids=["", "many-programs-per-row"])
def test_rows_are_shaped_as_the_reference_shapes_them(
    share: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_SHARE", share)
    edits = edits_of(*ROWS)
    wide = 3.0 * torch.randn(len(ROWS) + 3, VOCABULARY + 5)
    lines, rows = torch.randperm(len(wide))[: len(ROWS)], torch.randperm(len(ROWS))
    found, expected = wide.to(device, copy=True), wide.clone()
    shape_logits(found[:, :VOCABULARY], lines.to(device), rows.to(device), moved(edits, device))
    reference.shape_logits(expected[:, :VOCABULARY], lines, rows, edits)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    # Lines that are not listed, and the gaps between rows, are unchanged.
    others = [line for line in range(len(wide)) if line not in lines.tolist()]
    assert torch.equal(found.cpu()[others], wide[others])
    assert torch.equal(found.cpu()[:, VOCABULARY:], wide[:, VOCABULARY:])


def test_counts_follow_sampled_tokens(device: torch.device) -> None:
    pool = edits_of(
        Asked(counted={1: 0, 2: 3}, room=9),
        Asked(words=[[1, 2]]),
        Asked(counted={token: 1 for token in range(1500)}, room=9),
    )
    found, expected = moved(pool, device), moved(pool, torch.device("cpu"))
    order = torch.tensor([2, 0, 1])
    for step in range(TAIL + 3):
        tokens = torch.tensor([1400 + 90 * (step % 2) + step % 7, step % 5, step])
        assert reference.count_tokens(tokens, order, expected)
        count_tokens(tokens.to(device), order.to(device), found)
    for column in ("ids", "bounds", "num_drawn", "tails"):
        assert torch.equal(getattr(found, column).cpu(), getattr(expected, column))
    torch.testing.assert_close(found.values.cpu(), expected.values, equal_nan=True, rtol=0, atol=0)


def test_zero_rows_need_no_work(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    edits = moved(edits_of(Asked()), device)
    shape_logits(torch.zeros(1, 5, device=device), none, none, edits)
    count_tokens(none, none, edits)
    assert int(edits.num_drawn[0]) == 0


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU only the debug build checks, and what it finds ends the process")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Asked(biases={VOCABULARY: 1.0}), "biases of the edits leave the vocabulary"),
        (Asked(words=[[VOCABULARY]]), "words of the edits leave the vocabulary"),
        (Asked(stops=[-1], min_tokens=1), "stops of the edits leave the vocabulary"),
        (Asked(counted={VOCABULARY: 1}), "counted ids leave the vocabulary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_debug_builds_refuse_ids_beyond_the_vocabulary(row: Asked, message: str, device: torch.device) -> None:
    first = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(Exception, match=message):
        shape_logits(torch.zeros(1, VOCABULARY, device=device), first, first, edits_of(row))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU only the debug build checks, and what it finds ends the process")
def test_debug_builds_refuse_a_token_without_room(device: torch.device) -> None:
    edits = edits_of(Asked(counted={1: 0}, room=1))
    row = torch.zeros(1, dtype=torch.int64)
    count_tokens(row + 2, row, edits)
    with pytest.raises(Exception, match="count_tokens: edits have a row without room for another id"):
        count_tokens(row + 3, row, edits)
