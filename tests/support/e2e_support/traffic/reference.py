"""The independent reference: transformers runs the demo model, one prompt at a time, in float32 and in bfloat16.

It is used to choose prompts and by the test that recomputes some of them. The driver itself needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from e2e_support.traffic.prompts import MODEL, FinishReason, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    margin: float
    """The smallest lead, in standard deviations of a step's logits."""


class Reference:
    def __init__(self) -> None:
        self._exact = _model(torch.float32)
        self._rounded = _model(torch.bfloat16)
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
        config = self._exact.generation_config
        assert config is not None and isinstance(config.eos_token_id, list)
        self.stops = frozenset(config.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def continue_greedily(self, prompt: Sequence[int], max_tokens: int, margin: float) -> Continuation:
        """Return the greedy tokens up to `max_tokens`, a stop token, or the first step whose lead is below `margin`."""
        step, cache = torch.tensor([list(prompt)]), None
        taken: list[int] = []
        lowest = float("inf")
        while len(taken) < max_tokens:
            out = self._exact(step, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            best = logits.topk(2)
            lead = float((best.values[0] - best.values[1]) / logits.std())
            if lead < margin:
                break
            lowest = min(lowest, lead)
            taken.append(int(best.indices[0]))
            if taken[-1] in self.stops:
                return Continuation(token_ids=tuple(taken), finish_reason="stop", margin=lowest)
            step = torch.tensor([[taken[-1]]])
        return Continuation(token_ids=tuple(taken), finish_reason="length", margin=lowest)

    def leads(self, prompt: Sequence[int], answer: Sequence[int], *, rounded: bool) -> list[float]:
        """Return by how many standard deviations each token of the answer leads all others; negative if it does not."""
        model = self._rounded if rounded else self._exact
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()  # [answer, vocabulary]
        chosen = torch.tensor(list(answer)).unsqueeze(1)
        others = logits.scatter(1, chosen, -torch.inf).amax(1)
        return list(((logits.gather(1, chosen).squeeze(1) - others) / logits.std(dim=1)).tolist())

    def bfloat16_shift(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return the largest change of a lead by bfloat16."""
        pairs = zip(self.leads(prompt, answer, rounded=False), self.leads(prompt, answer, rounded=True), strict=True)
        return max(abs(exact - rounded) for exact, rounded in pairs)


def _model(dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    return model.requires_grad_(False)
