"""A row of a parity table: a tiny random model that transformers creates and saves, and its prompts."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCABULARY = 250
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 47, 65)
ANSWER = 20
MAX_MODEL_LEN = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    family: str
    """transformers' ``model_type``."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its config.json, or of its ``text_config``, in addition to ``_SMALL``; None leaves out one of those."""
    whole: dict[str, Any] | None = None
    """The other fields of a model whose text part is compared."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that are changed afterwards, as another version of transformers writes them; None removes
    one."""
    saved: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``save_pretrained``."""
    lengths: tuple[int, ...] = LENGTHS
    max_model_len: int = MAX_MODEL_LEN
    attention: str = "eager"
    """The reference's implementation: the others omit a soft cap."""
    bfloat16_error: float = 0.1
    """The mean deviation that bfloat16 may cause in the logprob of a prompt's next token."""


_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def models_of(case: Case) -> Any:
    """Return transformers' factory of the model."""
    return AutoModelForCausalLM if case.whole is None else AutoModelForImageTextToText


def save(case: Case, folder: Path) -> None:
    """Save a checkpoint in Hugging Face layout, the same at every call."""
    torch.manual_seed(11)
    fields = {name: value for name, value in {**_SMALL, **case.fields}.items() if value is not None}
    if case.whole is not None:
        fields = {"text_config": fields, **case.whole}
    model = models_of(case).from_config(AutoConfig.for_model(case.family, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initial biases of 0 and norms of 1 would hide one that is not applied
                parameter += torch.randn_like(parameter) * 0.15
            elif not parameter.any():  # routers of 0 would leave the choice of experts to chance
                parameter += torch.randn_like(parameter) * 0.5
    model.save_pretrained(folder, **case.saved)
    if case.config:
        file = folder / "config.json"
        raw = {**json.loads(file.read_text()), **case.config}
        file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return alternating beginnings of two sequences, so that prefixes are shared."""
    numbers = random.Random(5)
    stems = [[numbers.randrange(3, VOCABULARY) for _ in range(max(lengths))] for _ in range(2)]
    return [stems[index % 2][:length] for index, length in enumerate(lengths)]
