#!/usr/bin/env python3
"""Train quire's demo model that calls tools, on dialogues that this folder's scripts generate.

    python examples/models/train_tools.py --out DIR     train it, evaluate it, write DIR/quire-demo-tools
    python examples/models/train_tools.py --check       evaluate the model next to this script on held-out questions

The stages in order: tool_dialogues (chats) > tool_vocabulary (tokens) > induction (first weights) > learning (model) >
checkpoint (folder) > tool_evaluation (figures). The same Python, library versions, thread count and processor give the
same weights.
"""

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import cast

if __name__ == "__main__":
    # torch reads this when it is loaded. Waiting threads must sleep, or another busy process makes a step ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from checkpoint import save
from evaluation import load
from induction import add_induction
from learning import Progress, RowStream, Schedule, Shape, build_model, count_parameters
from tool_dialogues import Choice, Values
from tool_evaluation import evaluate, held_out_choices, results, shares_of, trials
from tool_vocabulary import (
    encode_copies,
    encode_forced_call,
    encode_tool_dialogue,
    tokenizer_texts,
    train_tool_tokenizer,
)
from train import (
    RECORD_NAME,
    positive,
    precision_of,
    sha256,
    token_ids,
    train_deterministically,
    train_with_progress,
    versions,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import Example

HERE = Path(__file__).resolve().parent
FOLDER = "quire-demo-tools"
VOCAB_SIZE = 2048
MAX_LENGTH = 4096
# The heads of the induction circuit need rotary frequencies that hardly turn within a prompt.
SHAPE = Shape(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    rope_theta=1_000_000.0,
)
QUESTIONS_PER_CASE, PROBED_PER_CASE = 100, 20
_ROWS_PER_EPOCH = 256
_TOKENS_PER_EXCHANGE = 100
_KNOWN_WORDS, _HELD_OUT_WORDS = 300, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMaterial:
    """The training material: rows without an end, and the tokenizer trained on some of the dialogues."""

    tokenizer: PreTrainedTokenizerFast
    choice: Choice
    seed: int

    def epoch(self, number: int, row_tokens: int) -> list[Example]:
        """Return new rows: some mere copies, some answers that `tool_choice` forces, and dialogues."""
        rng = random.Random(f"{self.seed}/dialogues/{number}")
        copies = _ROWS_PER_EPOCH // 16
        forced = _ROWS_PER_EPOCH // 8
        exchanges = row_tokens // _TOKENS_PER_EXCHANGE
        examples = [
            *(encode_copies(self.tokenizer, row_tokens, rng) for _ in range(copies)),
            *(self._forced(rng) for _ in range(forced)),
            *(
                encode_tool_dialogue(self.tokenizer, self.choice.dialogue(rng, exchanges))
                for _ in range(_ROWS_PER_EPOCH - copies - forced)
            ),
        ]
        return [example for example in examples if len(example.tokens) <= row_tokens]

    def _forced(self, rng: random.Random) -> Example:
        tools = self.choice.tools(rng, rng.randint(1, 4))
        tool = rng.choice(tools)
        exchange = self.choice.calls(tool, rng, self.choice.count(tool, rng))
        return encode_forced_call(self.tokenizer, tools, exchange, named=rng.random() < 0.5)


def prepare(seed: int) -> ToolMaterial:
    """Return the material, with a tokenizer trained on the first dialogues and on words."""
    words, _ = split_words()
    choice = Choice(values=Values(words=words, invented=0.5))
    rng = random.Random(f"{seed}/tokenizer")
    texts = tokenizer_texts((choice.dialogue(rng, 8) for _ in range(400)), words, rng)
    return ToolMaterial(tokenizer=train_tool_tokenizer(texts, VOCAB_SIZE, MAX_LENGTH), choice=choice, seed=seed)


def split_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the most frequent words of Python's help texts, and the next ones, which training never shows."""
    counts = Counter(word for text in topics.values() for word in re.findall(r"\b[a-z]{4,10}\b", text))
    found = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(found[:_KNOWN_WORDS]), tuple(found[_KNOWN_WORDS : _KNOWN_WORDS + _HELD_OUT_WORDS])


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    if "check" in given:
        if not (given.check / "model.safetensors").is_file():
            print(f"--check {given.check}: has no model.safetensors; name the folder of the model", file=sys.stderr)
            return 2
        model, tokenizer = load(given.check)
        figures = evaluate(model, tokenizer, held_out_choices(*split_words()), QUESTIONS_PER_CASE, given.seed)
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        return 0
    try:
        (given.out / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {given.out}: {error.strerror}; choose a folder that can be written", file=sys.stderr)
        return 2
    if given.continued and not (given.out / FOLDER / RECORD_NAME).is_file():
        print(f"--continue: {given.out / FOLDER} has no {RECORD_NAME}; train without it first", file=sys.stderr)
        return 2
    return run(given.out / FOLDER, given.steps, precision_of(given.precision), given.seed, given.continued)


def run(folder: Path, steps: int, precision: torch.dtype, seed: int, continued: bool) -> int:
    """Train the model, or continue the one in the folder, write it with its record, and return the exit status."""
    train_deterministically()
    earlier: list[object] = []
    if continued:
        loaded, tokenizer = load(folder)
        model = cast("LlamaForCausalLM", loaded)
        known = Choice(values=Values(words=split_words()[0], invented=0.5), refusals=0.45, pairs=0.6)
        # A seed of its own gives other dialogues than before.
        material = ToolMaterial(tokenizer=cast("PreTrainedTokenizerFast", tokenizer), choice=known, seed=seed + 1)
        earlier = json.loads((folder / RECORD_NAME).read_text())["stages"]
    else:
        material = prepare(seed)
        model = build_model(SHAPE, VOCAB_SIZE, MAX_LENGTH, token_ids(material.tokenizer), seed)
        add_induction(model, seed)
    ids = token_ids(material.tokenizer)
    schedule = Schedule(
        steps=steps,
        learning_rate=1.5e-3 if continued else 4e-3,
        tokens_per_step=2048,
        row_tokens=256,
        long_row_tokens=512,
        long_share=0.1,
        warmup_share=0.02,
    )
    stream = RowStream(material.epoch, ids.pad, material.seed)
    observe = _probe(model, material.tokenizer, seed)
    seconds = train_with_progress("tools", model, stream, schedule, precision, observe=observe)
    save(folder, model, material.tokenizer, ids)
    saved, tokenizer = load(folder)
    record = {
        "made_with": versions(precision, torch.get_num_threads(), seed),
        "stages": [*earlier, {"steps": steps, "seconds": asdict(seconds)}],
        "tokens_per_step": schedule.tokens_per_step,
        "parameters": count_parameters(saved),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "evaluation": evaluate(saved, tokenizer, held_out_choices(*split_words()), QUESTIONS_PER_CASE, seed),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (folder / RECORD_NAME).write_text(text)
    print(text, end="")
    return 0


def _probe(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> Callable[[Progress], None]:
    """Return a function that prints the shares of right answers to some held-out questions every 100 steps."""
    choice = next(iter(held_out_choices(*split_words()).values()))
    asked = list(trials(choice, PROBED_PER_CASE, random.Random(f"{seed}/probe")))

    def observe(progress: Progress) -> None:
        if (progress.step + 1) % 100 == 0:
            shares = shares_of(results(model, tokenizer, asked))
            text = ", ".join(f"{case} {share:.0%}" for case, share in shares.items())
            print(f"step {progress.step + 1}: {text}", file=sys.stderr, flush=True)

    return observe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_tools.py",
        description="Train quire's demo model that calls tools.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("out/models"), help=f"output folder, which gets {FOLDER}")
    parser.add_argument("--steps", type=positive, default=1500, help="training steps of 2,048 tokens each")
    parser.add_argument(
        "--continue",
        dest="continued",
        action="store_true",
        help="continue the model in --out, with more questions about two cities and more that no tool fits",
    )
    parser.add_argument("--threads", type=positive, default=2, help="number of torch threads; it affects the weights")
    parser.add_argument(
        "--precision", choices=("auto", "bfloat16", "float32"), default="auto", help="arithmetic of the training steps"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, dialogues and order")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=HERE / FOLDER,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="do not train: evaluate the model in DIR (default: next to this script)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
