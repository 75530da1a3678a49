"""Train quire's demo models, the target and its draft, on the help texts that come with Python.

    python examples/models/train.py --out DIR      train both, evaluate them, write DIR/quire-demo and …-draft
    python examples/models/train.py --check        load the models next to this script and let them answer

The stages in order: corpus (text) > dialogues (chats) > vocabulary (tokens) > learning (models) > checkpoint (folders)
> evaluation (figures). This file only runs them and shows progress. The same Python, library versions, thread count
and processor give the same weights.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

if __name__ == "__main__":
    # torch reads this when it is loaded. Waiting threads must sleep, or another busy process makes a step ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
import torch
import transformers
from checkpoint import DRAFT_FOLDER, MODEL_FOLDER, save
from corpus import Corpus, build_corpus
from dialogues import Subject, build_subjects, dialogue, held_out_questions, is_small_talk
from evaluation import SAMPLE_QUESTIONS, Sample, agreement, load, sample, text_loss
from learning import DRAFT, TARGET, Progress, RowStream, Schedule, TokenIds, build_model, count_parameters, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from safetensors import SafetensorError
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import TURN_END, Example, encode_dialogue, encode_text, split_text, train_tokenizer

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 4096
MAX_LENGTH = 4096
HELD_OUT_SHARE = 0.14
DIALOGUES_PER_SUBJECT = 3
# The first messages of users need reliable answers.
SMALL_TALK_DIALOGUES = 15
AGREEMENT_QUESTIONS = 40
RECORD_NAME = "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings from the command line."""

    out: Path
    steps: int
    draft_steps: int
    threads: int
    precision: torch.dtype
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTaken:
    """The wall-clock and CPU time in seconds. On a busy machine, only the CPU time shows the cost of training."""

    wall: int
    cpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The training material: the text, the subjects of questions, and the tokenizer trained on both."""

    corpus: Corpus
    subjects: Sequence[Subject]
    tokenizer: PreTrainedTokenizerFast
    ids: TokenIds
    text_examples: Sequence[Example]

    def epoch(self, number: int, row_tokens: int, seed: int) -> list[Example]:
        """Return the whole text once with new cuts, and newly worded dialogues about every subject."""
        rng = random.Random(f"{seed}/words/{number}")
        pieces = [
            piece
            for text in self.text_examples
            for piece in split_text(text, row_tokens, rng.randrange(row_tokens // 4, row_tokens))
        ]
        chats = [
            encode_dialogue(self.tokenizer, dialogue(subject, self.subjects, rng), row_tokens)
            for subject in self.subjects
            for _ in range(SMALL_TALK_DIALOGUES if is_small_talk(subject) else DIALOGUES_PER_SUBJECT)
        ]
        return [*pieces, *chats]

    def stream(self, seed: int) -> RowStream:
        """Return the rows of all epochs."""
        return RowStream(lambda number, row_tokens: self.epoch(number, row_tokens, seed), self.ids.pad, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if "check" in options:
        return check(options.check, Console())
    settings = Settings(
        out=options.out,
        steps=options.steps,
        draft_steps=options.draft_steps,
        threads=options.threads,
        precision=precision_of(options.precision),
        seed=options.seed,
    )
    try:
        return run(settings, console)
    except KeyboardInterrupt:
        console.print("interrupted before the models were written; nothing was saved")
        return 130


def run(settings: Settings, console: Console) -> int:
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"cannot write to --out {settings.out}: {error.strerror}. Choose a writable folder.")
        return 2
    train_deterministically()
    started = time.monotonic()
    material = prepare(console)
    target = build_model(TARGET, VOCAB_SIZE, MAX_LENGTH, material.ids, settings.seed)
    target_time = train_with_progress(
        "target",
        target,
        material.stream(settings.seed),
        Schedule(steps=settings.steps, learning_rate=8e-3),
        settings.precision,
    )
    draft = build_model(DRAFT, VOCAB_SIZE, MAX_LENGTH, material.ids, settings.seed)
    draft_schedule = Schedule(steps=settings.draft_steps, learning_rate=1e-2)
    draft_time = train_with_progress(
        "draft", draft, material.stream(settings.seed), draft_schedule, settings.precision, teacher=target
    )
    sizes = {MODEL_FOLDER: count_parameters(target), DRAFT_FOLDER: count_parameters(draft)}
    save(settings.out / MODEL_FOLDER, target, material.tokenizer, material.ids)
    save(settings.out / DRAFT_FOLDER, draft, material.tokenizer, material.ids)
    console.print("evaluating the saved models")
    record = {
        "made_with": versions(settings.precision, settings.threads, settings.seed),
        "steps": {"target": settings.steps, "draft": settings.draft_steps},
        "seconds": {"target": asdict(target_time), "draft": asdict(draft_time)},
        "parameters": sizes,
        "weights_sha256": {name: sha256(settings.out / name / "model.safetensors") for name in sizes},
        **evaluate(settings, material),
    }
    (settings.out / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    Console().print_json(data=record)
    console.print(f"done in {time.monotonic() - started:.0f} s: {settings.out / MODEL_FOLDER} and its draft next to it")
    return 0


def train_deterministically() -> None:
    """Let the same settings give the same weights."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory protects against reads of uninitialized values. It takes a tenth of a step and is not needed
    # here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def prepare(console: Console) -> Material:
    corpus = build_corpus(topics, HELD_OUT_SHARE)
    subjects = build_subjects(corpus.train)
    texts = [section.text for section in corpus.train]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE, MAX_LENGTH)
    ids = token_ids(tokenizer)
    text_examples = [encode_text(tokenizer, text) for text in texts]
    tokens = sum(len(example.tokens) for example in text_examples)
    console.print(
        f"{len(texts)} sections, {tokens} tokens of text, {len(subjects)} chat subjects; "
        f"{len(corpus.held_out)} sections held out"
    )
    return Material(corpus=corpus, subjects=subjects, tokenizer=tokenizer, ids=ids, text_examples=tuple(text_examples))


def token_ids(tokenizer: PreTrainedTokenizerFast) -> TokenIds:
    """Return the ids that the configuration of a model names."""
    return TokenIds(
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        turn_end=tokenizer.get_vocab()[TURN_END],
    )


def evaluate(settings: Settings, material: Material) -> dict[str, Any]:
    target, tokenizer = load(settings.out / MODEL_FOLDER)
    draft, _ = load(settings.out / DRAFT_FOLDER)
    texts = {
        "seen_text": [section.text for section in material.corpus.train[::8]],
        "held_out_text": [section.text for section in material.corpus.held_out],
    }
    questions = held_out_questions(material.subjects, AGREEMENT_QUESTIONS, random.Random(settings.seed))
    return {
        "loss": {
            name: {which: asdict(text_loss(model, tokenizer, texts[which])) for which in texts}
            for name, model in ((MODEL_FOLDER, target), (DRAFT_FOLDER, draft))
        },
        "draft_agreement": agreement(target, draft, tokenizer, questions).as_dict(),
        "samples": [
            asdict(sample(target, tokenizer, question, temperature=temperature))
            for question in SAMPLE_QUESTIONS
            for temperature in (0.0, 0.7)
        ],
    }


def check(folder: Path, console: Console) -> int:
    """Load both models and generate answers. Return the exit status: 0 if both were loaded."""
    for name in (MODEL_FOLDER, DRAFT_FOLDER):
        if not (folder / name / "model.safetensors").is_file():
            console.print(f"no model in {folder / name}: expected {folder / name / 'model.safetensors'}")
            return 2
        try:
            model, tokenizer = load(folder / name)
        except (OSError, ValueError, SafetensorError) as error:
            console.print(f"cannot load {folder / name}: {error}", markup=False, highlight=False)
            return 2
        console.print(f"[bold]{name}[/bold]: {count_parameters(model):,} parameters", highlight=False)
        for question in SAMPLE_QUESTIONS[:2]:
            _print_sample(console, sample(model, tokenizer, question, temperature=0.0))
    return 0


def _print_sample(console: Console, shown: Sample) -> None:
    console.print(f"\n> {shown.question}", style="cyan", markup=False, highlight=False)
    console.print(shown.answer, markup=False, highlight=False)
    console.print("" if shown.stopped else "(cut at its length limit)", style="dim")


def train_with_progress(
    name: str,
    model: LlamaForCausalLM,
    stream: RowStream,
    schedule: Schedule,
    precision: torch.dtype,
    teacher: LlamaForCausalLM | None = None,
    observe: Callable[[Progress], None] = lambda _: None,
) -> TimeTaken:
    """Train with a progress bar, or with lines of text if there is no terminal, and call ``observe`` in each step."""
    started, cpu_started = time.monotonic(), time.process_time()
    columns = (
        TextColumn(f"{name:6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with ProgressBar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=schedule.steps, loss=float("nan"))
        plain = _plain_report(name, schedule.steps, console)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.step + 1, loss=progress.loss)
            if not console.is_terminal:
                plain(progress)
            observe(progress)

        train(model, stream, schedule, precision=precision, report=report, teacher=teacher)
    return TimeTaken(wall=round(time.monotonic() - started), cpu=round(time.process_time() - cpu_started))


def _plain_report(name: str, steps: int, console: Console) -> Callable[[Progress], None]:
    """Print a line at intervals if there is no terminal for a progress bar."""
    every = max(1, steps // 20)

    def report(progress: Progress) -> None:
        if progress.step % every == 0 or progress.step == steps - 1:
            console.print(f"{name} step {progress.step + 1}/{steps} loss {progress.loss:.3f}", highlight=False)

    return report


def versions(precision: torch.dtype, threads: int, seed: int) -> dict[str, str | int]:
    """Return what the weights depend on: versions, arithmetic, number of threads, and seed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "precision": str(precision).removeprefix("torch."),
        "threads": threads,
        "seed": seed,
    }


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def precision_of(name: str) -> torch.dtype:
    """Return bfloat16 if the processor supports it. Emulated bfloat16 is several times slower."""
    if name == "auto":
        name = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    precision: torch.dtype = getattr(torch, name)
    return precision


def positive(text: str) -> int:
    """Return the number that an option has."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train quire's demo models (a chat model and its draft) on the help texts that come with Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/models"), help="output folder for both models and training.json"
    )
    parser.add_argument("--steps", type=positive, default=800, help="steps of the target, 1,920 tokens each")
    parser.add_argument("--draft-steps", type=positive, default=800, help="steps of the draft")
    parser.add_argument("--threads", type=positive, default=2, help="number of torch threads; it affects the weights")
    parser.add_argument(
        "--precision", choices=("auto", "bfloat16", "float32"), default="auto", help="arithmetic of the training steps"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and wordings")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=HERE,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="do not train: load the models in DIR (default: next to this script) and generate answers",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
