#!/usr/bin/env python3
"""Train two low-rank adapters (LoRA) on the demo model, whose answers differ visibly.

    python examples/models/train_adapters.py --out DIR    train both; write DIR/polite, DIR/brief and DIR/training.json

``polite`` begins every answer with "Certainly." and ends it with a question; ``brief`` answers with one sentence after
"In short:". The folders are in PEFT's layout. The same Python, library versions, thread count and processor give the
same weights.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

if __name__ == "__main__":
    # torch reads this when it is loaded. Waiting threads must sleep, or another busy process makes a step ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from corpus import build_corpus
from dialogues import Message, Subject, build_subjects, question
from evaluation import SAMPLE_QUESTIONS, load, sample
from learning import RowStream, step_loss
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import HELD_OUT_SHARE, RECORD_NAME, positive, sha256, versions
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vocabulary import Example, encode_dialogue

HERE = Path(__file__).resolve().parent
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
ROW_TOKENS, ROWS = 256, 4
LEARNING_RATE = 4e-3


def polite(answer: str) -> str:
    return f"Certainly. {answer} Do you have another question?"


def brief(answer: str) -> str:
    return f"In short: {answer.split('. ')[0].rstrip('.')}."


STYLES: Mapping[str, Callable[[str], str]] = {"polite": polite, "brief": brief}


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter that is trained."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        a = torch.empty(RANK, base.in_features).normal_(std=base.in_features**-0.5, generator=generator)
        self.a, self.b = nn.Parameter(a), nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + (alpha / r) B A x."""
        added = functional.linear(functional.linear(x, self.a), self.b)
        return self.base(x) + added * (ALPHA / RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A model whose linear layers have adapters, by the names of the layers."""

    model: PreTrainedModel
    layers: Mapping[str, LoraLinear]


def adapt(model: PreTrainedModel, seed: int) -> Adapted:
    """Give every linear layer of the decoder an adapter; all other parameters are frozen."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, LoraLinear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS:
            parent, _, own = name.rpartition(".")
            layers[name] = LoraLinear(module, generator)
            setattr(model.get_submodule(parent), own, layers[name])
    return Adapted(model=model, layers=layers)


def examples(
    subjects: Sequence[Subject], style: Callable[[str], str], tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> list[Example]:
    """Return a question about each subject, answered in the style; chats longer than a row are left out."""
    found = []
    for subject in subjects:
        asked: Message = {"role": "user", "content": question(subject, rng)}
        answered: Message = {"role": "assistant", "content": style(subject.answer)}
        example = encode_dialogue(tokenizer, [asked, answered])
        if len(example.tokens) <= ROW_TOKENS:
            found.append(example)
    return found


def train_adapter(name: str, base: Path, steps: int, seed: int) -> tuple[Adapted, PreTrainedTokenizerBase, float]:
    """Return the model with a trained adapter, the model's tokenizer, and the loss of the last step."""
    model, tokenizer = load(base)
    adapted = adapt(model, seed)
    subjects = build_subjects(build_corpus(topics, HELD_OUT_SHARE).train)
    stream = RowStream(
        lambda epoch, _: examples(subjects, STYLES[name], tokenizer, random.Random(f"{seed}/{epoch}")),
        tokenizer.pad_token_id,
        seed,
    )
    parameters = [parameter for layer in adapted.layers.values() for parameter in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    # The rate rises for a tenth of the steps, and then falls to 0 in a straight line.
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))
    )
    last = float("nan")
    for step in range(steps):
        inputs, labels = stream.take(ROWS, ROW_TOKENS)
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(adapted.model, inputs, labels, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        last = loss.item()
        if step % 10 == 0 or step == steps - 1:
            print(f"{name} step {step + 1}/{steps} loss {last:.3f}", file=sys.stderr, flush=True)
    return adapted, tokenizer, last


def save(folder: Path, adapted: Adapted) -> None:
    """Write the adapter in PEFT's layout, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in adapted.layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.a.detach().bfloat16().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.b.detach().bfloat16().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "quire-demo",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if not (given.model / "model.safetensors").is_file():
        print(f"--model {given.model}: has no model.safetensors; name the folder of the demo model", file=sys.stderr)
        return 2
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {given.out}: {error.strerror}; choose a folder that can be written", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    torch.use_deterministic_algorithms(True)
    record: dict[str, object] = {
        "made_with": versions(torch.float32, given.threads, given.seed),
        "steps": given.steps,
        "base_sha256": sha256(given.model / "model.safetensors"),
    }
    for name in STYLES:
        adapted, tokenizer, loss = train_adapter(name, given.model, given.steps, given.seed)
        save(given.out / name, adapted)
        shown = [sample(adapted.model.eval(), tokenizer, asked, temperature=0.0) for asked in SAMPLE_QUESTIONS]
        for one in shown:
            print(f"{name}: {one.question} -> {one.answer}", flush=True)
        record[name] = {
            "weights_sha256": sha256(given.out / name / "adapter_model.safetensors"),
            "loss": loss,
            "samples": [asdict(one) for one in shown],
        }
    (given.out / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_adapters.py",
        description="Train two adapters (LoRA) on quire's demo model, whose answers differ visibly.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, default=HERE / "quire-demo", help="folder of the demo model")
    parser.add_argument("--out", type=Path, default=Path("out/adapters"), help="output folder, one folder per adapter")
    parser.add_argument("--steps", type=positive, default=80, help="steps per adapter, 1,024 tokens each")
    parser.add_argument("--threads", type=positive, default=2, help="number of torch threads; it affects the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and wordings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
