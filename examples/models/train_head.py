#!/usr/bin/env python3
"""Distil a draft head (EAGLE) from the demo model: one layer that reads the model's hidden states.

    python examples/models/train_head.py --out DIR    train it; write DIR/quire-demo-eagle and DIR/…/training.json

The head learns the hidden states and the next tokens of the demo model on the text of ``train.py``. The same Python,
library versions, thread count and processor give the same weights.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    # torch reads this when it is loaded. Waiting threads must sleep, or another busy process makes a step ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from dialogues import held_out_questions
from evaluation import greedy_answer, load
from head import EagleHead, greedy_steps, load_head, make_head, save_head, train_head
from learning import Progress, Schedule, count_parameters
from rich.console import Console
from train import (
    AGREEMENT_QUESTIONS,
    RECORD_NAME,
    Material,
    positive,
    precision_of,
    prepare,
    sha256,
    train_deterministically,
    versions,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
HEAD_FOLDER = "quire-demo-eagle"
DRAFTED_TOKENS = 4
_LONGEST_ANSWER = 48


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if not (given.model / "model.safetensors").is_file():
        print(f"--model {given.model}: has no model.safetensors; name the folder of the demo model", file=sys.stderr)
        return 2
    folder = given.out / HEAD_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {given.out}: {error.strerror}; choose a folder that can be written", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    train_deterministically()
    loaded, tokenizer = load(given.model)
    target = cast("LlamaForCausalLM", loaded).requires_grad_(False)
    material = prepare(Console(stderr=True))
    if material.tokenizer.get_vocab() != tokenizer.get_vocab():
        print(f"--model {given.model}: its tokenizer is not that of this Python's help texts", file=sys.stderr)
        return 2
    precision = precision_of(given.precision)
    head = make_head(target, given.seed)
    wall, cpu = time.monotonic(), time.process_time()
    loss = _train(head, target, material, given.steps, precision, given.seed)
    seconds = {"wall": round(time.monotonic() - wall), "cpu": round(time.process_time() - cpu)}
    save_head(folder, head, target.config.vocab_size)
    record = {
        "made_with": versions(precision, given.threads, given.seed),
        "steps": given.steps,
        "seconds": seconds,
        "parameters": count_parameters(head),
        "base_sha256": sha256(given.model / "model.safetensors"),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "loss": loss,
        "acceptance": evaluate(load_head(folder), target, tokenizer, material, given.seed),
    }
    text = json.dumps(record, indent=2) + "\n"
    (folder / RECORD_NAME).write_text(text)
    print(text, end="")
    return 0


def _train(
    head: EagleHead, target: LlamaForCausalLM, material: Material, steps: int, precision: torch.dtype, seed: int
) -> float:
    """Train the head, and return the loss of the last step."""
    losses: list[float] = []

    def report(progress: Progress) -> None:
        losses.append(progress.loss)
        if progress.step % 20 == 0 or progress.step == steps - 1:
            print(f"head step {progress.step + 1}/{steps} loss {progress.loss:.3f}", file=sys.stderr, flush=True)

    schedule = Schedule(steps=steps, learning_rate=1e-2)
    train_head(head, target, material.stream(seed), schedule, precision=precision, report=report)
    return losses[-1]


def evaluate(
    head: EagleHead, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, material: Material, seed: int
) -> dict[str, Any]:
    """Return the share of accepted drafts by their place in a step, along the target's greedy answers."""
    reached, right = [0] * DRAFTED_TOKENS, [0] * DRAFTED_TOKENS
    tokens = steps = 0
    for question in held_out_questions(material.subjects, AGREEMENT_QUESTIONS, random.Random(seed)):
        token_ids, start = greedy_answer(target, tokenizer, question, max_new_tokens=_LONGEST_ANSWER)
        for chain in greedy_steps(head, target, token_ids, start, DRAFTED_TOKENS):
            for number in range(len(chain.drafts)):
                reached[number] += 1
                right[number] += number < chain.accepted
            tokens, steps = tokens + chain.accepted + 1, steps + 1
    return {
        "drafted_tokens": DRAFTED_TOKENS,
        "share_by_position": [accepted / proposed for accepted, proposed in zip(right, reached, strict=True)],
        "tokens_per_step": tokens / steps,
        "steps": steps,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_head.py",
        description="Distil a draft head in the layout of EAGLE from quire's demo model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, default=HERE / "quire-demo", help="folder of the demo model")
    parser.add_argument("--out", type=Path, default=Path("out/head"), help="output folder")
    parser.add_argument("--steps", type=positive, default=800, help="steps, 1,920 tokens each")
    parser.add_argument("--threads", type=positive, default=2, help="number of torch threads; it affects the weights")
    parser.add_argument(
        "--precision", choices=("auto", "bfloat16", "float32"), default="auto", help="arithmetic of the training steps"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and wordings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
