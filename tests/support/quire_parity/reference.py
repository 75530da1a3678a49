"""The greedy answers of transformers in float32, one prompt at a time, and their comparison with an answer.

Equal means: the same tokens, or a near tie of the reference at the first difference: its two best logits differ by less
than 1e-3 of the logits' standard deviation, because matrix products round differently in another batch. Near ties are
counted. The probabilities of equal tokens are compared as well, because a wrong window, soft cap or scale may not
change the most likely token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quire_parity.cases import ANSWER
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-3
LOGPROB_ERROR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    """The log-probabilities of its own tokens."""
    gaps: list[float]
    """The differences between the two best logits, in standard deviations of the logits."""


@dataclass(slots=True)
class Tally:
    compared: int = 0
    near_ties: int = 0


def load_reference(folder: Path, attention: str, models: Any = AutoModelForCausalLM) -> PreTrainedModel:
    model: PreTrainedModel = models.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


def generate(model: PreTrainedModel, prompt: list[int]) -> Answer:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(found.logits).float()  # [ANSWER, vocabulary]
    tokens = found.sequences[0, len(prompt) :]
    best = logits.topk(2).values
    return Answer(
        token_ids=tokens.tolist(),
        logprobs=logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist(),
        gaps=((best[:, 0] - best[:, 1]) / logits.std(dim=1)).tolist(),
    )


def compare(expected: Answer, token_ids: list[int], logprobs: list[float], tally: Tally, what: str) -> None:
    assert len(token_ids) == len(expected.token_ids), f"{what}: {len(token_ids)} tokens"
    for place, (found, right) in enumerate(zip(token_ids, expected.token_ids, strict=True)):
        tally.compared += 1
        if found != right:
            gap = expected.gaps[place]
            assert gap <= NEAR_TIE, f"{what}: token {place} is {found}, not {right}, ahead by {gap:.4f} deviations"
            tally.near_ties += 1
            return
        error = abs(logprobs[place] - expected.logprobs[place])
        assert error <= LOGPROB_ERROR * (1 + abs(expected.logprobs[place])), (
            f"{what}: token {place} has logprob {logprobs[place]:.6f}, not {expected.logprobs[place]:.6f}"
        )
