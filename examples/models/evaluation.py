"""Evaluation of the trained models: loss on unseen text, agreement of the draft, and sample answers.

It loads the saved folders (bfloat16 weights as float32), so it measures the models as shipped. It does not depend on
training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SAMPLE_QUESTIONS = (
    "What is a list comprehension?",
    "Explain the with statement.",
    "What does str.split() do?",
    "Tell me about generators.",
    "Hello!",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLoss:
    """The loss on continuous text per token, and per byte for comparison between tokenizers."""

    nats_per_token: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of draft and target: the share of greedy positions with equal tokens."""

    share: float
    positions: int
    # Tokens per speculative step with this many draft tokens, including the target's own token.
    drafted_tokens: int
    tokens_per_step: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    question: str
    temperature: float
    answer: str
    stopped: bool


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the folder with transformers, without network access."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.inference_mode()
def text_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TextLoss:
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]  # [T - 1, V]
        nats += functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
        size += len(text.encode())
    mean = nats / tokens
    return TextLoss(nats_per_token=mean, perplexity=math.exp(mean), bits_per_byte=nats / math.log(2) / size)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """Return the token ids of one user turn, [1, T]. The chat template writes the BOS itself."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    temperature: float,
    max_new_tokens: int = 160,
    seed: int = 0,
) -> Sample:
    """Return one answer; greedy at temperature 0."""
    prompt = prompt_ids(tokenizer, question)
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 0.95}
    output = _generate(model, prompt, max_new_tokens, drawn if temperature else _GREEDY)
    answer = str(tokenizer.decode(output[prompt.shape[1] :], skip_special_tokens=True))
    stops = model.generation_config.eos_token_id
    return Sample(question=question, temperature=temperature, answer=answer, stopped=int(output[-1]) in stops)


def agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    *,
    max_new_tokens: int = 96,
    drafted_tokens: int = 4,
) -> Agreement:
    """Generate the target's greedy answer, and compare the draft's choice at each of its positions."""
    agreed: list[bool] = []
    steps = 0
    for question in questions:
        matches = greedy_matches(target, draft, tokenizer, question, max_new_tokens=max_new_tokens)
        agreed += matches
        steps += _speculative_steps(matches, drafted_tokens)
    return Agreement(
        share=sum(agreed) / len(agreed),
        positions=len(agreed),
        drafted_tokens=drafted_tokens,
        tokens_per_step=len(agreed) / steps,
    )


@torch.inference_mode()
def greedy_matches(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    max_new_tokens: int,
) -> list[bool]:
    """Return for each token of the target's greedy answer whether the draft would choose it there."""
    prompt = prompt_ids(tokenizer, question)
    output = _generate(target, prompt, max_new_tokens, _GREEDY)
    logits = draft(input_ids=output[None], use_cache=False).logits[0]  # [T, V]
    start = prompt.shape[1]
    matches: list[bool] = (logits[start - 1 : -1].argmax(-1) == output[start:]).tolist()
    return matches


# The generation settings in the folder enable sampling; transformers warns about a temperature without it.
_GREEDY: Mapping[str, object] = {"do_sample": False, "temperature": None, "top_p": None}


def _generate(
    model: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int, how: Mapping[str, object]
) -> torch.Tensor:
    """Return prompt and answer, [T]."""
    generate: Any = model.generate
    output: torch.Tensor = generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **how
    )
    return output[0]


def _speculative_steps(matches: Sequence[bool], drafted_tokens: int) -> int:
    """Return the number of steps to emit these tokens when the target verifies `drafted_tokens` at once.

    A step accepts the draft tokens up to the first mismatch, and adds one token of the target.
    """
    steps = position = 0
    while position < len(matches):
        accepted = 0
        while accepted < drafted_tokens and position + accepted < len(matches) and matches[position + accepted]:
            accepted += 1
        position += accepted + 1
        steps += 1
    return steps
