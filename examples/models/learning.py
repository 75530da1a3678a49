"""The two Llama shapes and their training: the target learns from the text, the draft from the text and the target.

This is the fourth stage of training. It converts examples into trained models. Order, shuffling and initial weights
depend only on the seed. It does not depend on files or on the contents of the text.

Shapes: T tokens of one step, R rows, L tokens of a row, P positions that count in the loss, V vocabulary.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from vocabulary import Example

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters in which the models differ."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10_000.0


TARGET = Shape(
    hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4
)
DRAFT = Shape(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The number of steps and the learning rate.

    The last steps use longer rows, so that the model sees some long contexts.
    """

    steps: int
    learning_rate: float
    tokens_per_step: int = 1920
    row_tokens: int = 320
    long_row_tokens: int = 960
    long_share: float = 0.15
    warmup_share: float = 0.05
    weight_decay: float = 0.1
    final_rate_share: float = 0.02
    max_gradient_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to `final_rate_share`."""
        warmup = max(1, round(self.steps * self.warmup_share))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_rate_share + (1 - self.final_rate_share) * cosine)

    def row_length(self, step: int) -> int:
        return self.long_row_tokens if step >= self.steps * (1 - self.long_share) else self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The special token ids in a model's configuration."""

    bos: int
    eos: int
    pad: int
    turn_end: int


def build_model(shape: Shape, vocab_size: int, max_length: int, ids: TokenIds, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=ids.bos,
        eos_token_id=ids.eos,
        pad_token_id=ids.pad,
    )
    return LlamaForCausalLM(config)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class RowStream:
    """An endless stream of training data: the examples of each epoch, shuffled and packed into rows.

    Every row starts with the beginning of an example, as every prompt does. Otherwise the model would never see an
    example at the first position.
    """

    def __init__(self, epoch_examples: Callable[[int, int], Sequence[Example]], pad: int, seed: int) -> None:
        """Store `epoch_examples(epoch, row_tokens)`, which returns the examples of an epoch, none longer than a row."""
        self._epoch_examples = epoch_examples
        self._pad = pad
        self._seed = seed
        self._epoch = 0
        self._length = 0
        self._rows: list[Example] = []

    def take(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and the labels one position ahead, each [R, L], with `IGNORED` at positions without loss."""
        if length != self._length:
            self._length, self._rows = length, []
        while len(self._rows) < rows:
            examples = list(self._epoch_examples(self._epoch, length))
            random.Random(f"{self._seed}/order/{self._epoch}").shuffle(examples)
            self._rows += pack(examples, length)
            self._epoch += 1
        taken = self._rows[:rows]
        del self._rows[:rows]
        inputs = [[*row.tokens, *[self._pad] * (length - len(row.tokens))] for row in taken]
        return torch.tensor(inputs), torch.tensor([_labels(row, length) for row in taken])


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Pack whole examples into rows of at most `length` tokens, each into the first row with enough space."""
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in examples:
        size = len(example.tokens)
        index = next((number for number, free in enumerate(room) if free >= size), len(rows))
        if index == len(rows):
            rows.append([])
            room.append(length)
        rows[index].append(example)
        room[index] -= size
    return [
        Example(
            tokens=tuple(token for example in row for token in example.tokens),
            learned=tuple(learned for example in row for learned in example.learned),
        )
        for row in rows
    ]


def _labels(row: Example, length: int) -> list[int]:
    ahead = zip(row.tokens[1:], row.learned[1:], strict=True)
    labels = [token if learned else IGNORED for token, learned in ahead]
    return labels + [IGNORED] * (length - len(labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of training after a step."""

    step: int
    loss: float


def train(
    model: LlamaForCausalLM,
    stream: RowStream,
    schedule: Schedule,
    *,
    precision: torch.dtype,
    report: Callable[[Progress], None],
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Run the schedule.

    With a teacher, half of the loss comes from the text and half from the teacher's distribution.
    """
    optimizers = make_optimizers(model, schedule)
    model.train()
    for step in range(schedule.steps):
        length = schedule.row_length(step)
        inputs, labels = stream.take(schedule.tokens_per_step // length, length)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss = step_loss(model, inputs, labels, teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
        report(Progress(step=step, loss=loss.item()))
    model.eval()


def step_loss(
    model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor, teacher: LlamaForCausalLM | None
) -> torch.Tensor:
    """Return the mean loss over the P positions that count.

    The LM head runs on all positions. With a different matrix size in each step, the CPU library would compile and keep
    a new kernel per step (measured: 4 GB more after 1,000 steps).
    """
    counted = labels != IGNORED
    logits = model(input_ids=inputs, use_cache=False).logits[counted].float()  # [P, V]
    own = functional.cross_entropy(logits, labels[counted])
    if teacher is None:
        return own
    with torch.no_grad():
        taught = teacher(input_ids=inputs, use_cache=False).logits[counted].float()  # [P, V]
    chosen = functional.log_softmax(logits, dim=-1)
    wanted = functional.log_softmax(taught, dim=-1)
    return 0.5 * own + 0.5 * functional.kl_div(chosen, wanted, reduction="batchmean", log_target=True)


def make_optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings and norms.

    At equal time per step, Muon reaches after 160 steps what AdamW reaches after several times as many (measured).
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
