"""Shaping of logits in Triton: many programs for a row, and the checks of debug builds."""

import pytest
import torch
from logit_edits import Asked, edits_of

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.logit_shaping import kernel, reference, shape_logits

VOCABULARY = 301


def test_many_programs_share_a_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_SHARE", 128)
    asked = Asked(allowed=[*range(0, 300, 3)], biases={6: 1.0}, counted={3: 1, 297: 2}, penalties=(1.3, -0.5, 0.1))
    edits = edits_of(asked, asked)
    logits, rows = torch.randn(2, VOCABULARY), torch.arange(2)
    found, expected = logits.to(device, copy=True), logits.clone()
    on_device = type(edits)(**{name: getattr(edits, name).to(device) for name in edits.__dataclass_fields__})
    shape_logits(found, rows.to(device), rows.to(device), on_device)
    reference.shape_logits(expected, rows, rows, edits)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


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
