#!/usr/bin/env python3
"""Measure speculation: tokens per second of decoding with it and without it, in one process.

By prompt lookup, the model is a successor model (``benchmarks.models.variants``), so that the answers are known
and are checked:

  copy     the answer repeats the prompt; nearly all drafts are accepted
  novel    the answer repeats nothing, so nothing is proposed
  mislead  the prompt has every pair of tokens of the answer, with another continuation: all drafts are rejected

With a draft model, the models are the demo pair, and the prompts are questions that it knows:

  demo     the pair as it is; a step of the draft model costs nearly as much as one of the target
  padded   a target with further layers of no effect (``benchmarks.models.variants``)

Runs with and without speculation alternate; the ratio is the median over pairs of runs.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.models.random_model import SHAPES
from benchmarks.models.variants import write_successor_model
from benchmarks.report import machine, parser, save, show_table, usable_cpus
from benchmarks.serving.draft_pairs import demo_pair
from benchmarks.serving.steps import Bench
from quire_engine.config import SpeculationOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.ipc.process import compute_environment

LOOKUP_TEXTS = ("copy", "novel", "mislead")
PAIR_TEXTS = ("demo", "padded")
_SECTION = 128
"""The tokens of a text that repeats itself, and of the prompts of the others."""
_STRIDE = 7
"""The difference between the lengths of consecutive answers of a pair, which are half of the longest one or more."""


@dataclass(frozen=True, kw_only=True)
class Result:
    text: str
    sequences: int
    plain_tokens_per_second: float
    speculating_tokens_per_second: float
    ratio: float
    lowest_ratio: float
    tokens_per_step: float
    """The tokens that each sequence gains in a step with speculation."""
    accepted_share: float
    """The accepted share of the verified drafts; 0 without any."""
    step_ratio: float | None = None
    """The time of a target's step over the draft's; None without a draft model."""


@dataclass(frozen=True, kw_only=True)
class Run:
    answers: list[list[int]]
    tokens_per_second: float
    tokens_per_step: float
    accepted_share: float


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The prompts of each kind, all with the answers that ``successors`` determine."""

    successors: list[int]
    loops: list[list[int]]
    """Parts of the vocabulary in which the last token is followed by the first."""
    chain: list[int]
    """The rest of it, as one such part: its text does not repeat within an answer."""

    def prompt(self, kind: str, number: int, answer: int) -> list[int]:
        if kind == "copy":
            return self.loops[number % len(self.loops)]
        start = number * 997 % len(self.chain)
        text = [self.chain[(start + place) % len(self.chain)] for place in range(_SECTION + answer)]
        if kind == "novel":
            return text[:_SECTION]
        pairs = zip(text[_SECTION - 2 :], text[_SECTION - 1 :], strict=False)
        wrong = self.loops[number % len(self.loops)]
        misleading = [token for place, pair in enumerate(pairs) for token in (*pair, wrong[place % _SECTION])]
        return [*misleading, *text[:_SECTION]]

    def answer(self, prompt: list[int], length: int) -> list[int]:
        tokens = prompt[-1:]
        for _ in range(length):
            tokens.append(self.successors[tokens[-1]])
        return tokens[1:]


def make_texts(vocabulary: int, loops: int = 8) -> Texts:
    """Return texts over a vocabulary; token 0, which ends texts, follows itself."""
    tokens = list(range(1, vocabulary))
    random.Random(7).shuffle(tokens)
    parts = [tokens[_SECTION * number : _SECTION * (number + 1)] for number in range(loops)]
    parts.append(tokens[_SECTION * loops :])
    successors = list(range(vocabulary))
    for part in parts:
        for token, following in zip(part, [*part[1:], part[0]], strict=True):
            successors[token] = following
    return Texts(successors=successors, loops=parts[:-1], chain=parts[-1])


def measure(
    bench: Bench,
    prompts: list[list[int]],
    answer: int,
    options: SpeculationOptions | None,
    more: Sequence[list[int]] = (),
) -> Run:
    """Decode the answers to some prompts, which are not in the time.

    With ``more`` prompts, which are, each answer that ends is followed by the next, and the time ends when there is
    none: drafts let answers advance unevenly, and the last ones alone would be another load. Their lengths differ, or
    without drafts all answers would end, and all prompts arrive, in the same steps.
    """
    engine = make_engine(bench.model, scheduler=bench.config.scheduler, speculation=options)
    answers: list[list[int]] = [[] for _ in prompts]

    def add(key: int, prompt: list[int]) -> None:
        length = answer - _STRIDE * key % (answer // 2) if more else answer
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        refusal = engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0))
        if refusal is not None:
            raise SystemExit(refusal)

    for key, prompt in enumerate(prompts):
        add(key, prompt)

    def step() -> int:
        """Run a step and return how many answers it ended."""
        done = engine.step()
        assert done is not None
        for key, token_id in zip(done.keys, done.token_ids, strict=True):
            if key < len(answers):
                answers[key].append(token_id)
        return len(done.finished)

    while (now := engine.gauges()).num_waiting or now.prefilling_tokens:
        step()
    counters = engine.counters
    before, steps = counters.generation_tokens, counters.steps
    began = perf_counter()
    waiting = list(enumerate(more, start=len(prompts)))
    while engine.has_work:
        ended = step()
        if more and ended > len(waiting):
            break
        for _ in range(ended if more else 0):
            add(*waiting.pop(0))
    seconds = perf_counter() - began
    tokens = counters.generation_tokens - before
    return Run(
        answers=answers,
        tokens_per_second=tokens / seconds,
        tokens_per_step=tokens / len(prompts) / max(1, counters.steps - steps),
        accepted_share=counters.accepted_tokens / max(1, counters.draft_tokens),
    )


def compare(kind: str, measure_plain: Callable[[], Run], measure_speculating: Callable[[], Run], runs: int) -> Result:
    """Run both alternately, and return the medians."""
    plain: list[Run] = []
    speculating: list[Run] = []
    for number in range(runs):
        # Either order, so that neither always runs on the warmer machine.
        for speculates in (False, True) if number % 2 else (True, False):
            (speculating if speculates else plain).append(measure_speculating() if speculates else measure_plain())
    pairs = list(zip(speculating, plain, strict=True))
    ratios = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    return Result(
        text=kind,
        sequences=len(plain[0].answers),
        plain_tokens_per_second=statistics.median(run.tokens_per_second for run in plain),
        speculating_tokens_per_second=statistics.median(run.tokens_per_second for run in speculating),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        tokens_per_step=statistics.median(run.tokens_per_step for run in speculating),
        accepted_share=statistics.median(run.accepted_share for run in speculating),
    )


def compare_by_lookup(arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of the texts for prompt lookup; raise SystemExit if an answer is wrong."""
    shape = replace(SHAPES[arguments.shape], tied_embeddings=False)
    texts = make_texts(shape.vocabulary)
    options = SpeculationOptions(max_tokens=arguments.drafts)
    with tempfile.TemporaryDirectory(prefix="quire-speculation-") as name:
        write_successor_model(Path(name), shape, texts.successors)
        bench = Bench(Path(name), threads=arguments.threads, dtype=arguments.dtype, kv_cache_bytes=2**30)
        for kind in (text for text in arguments.texts if text in LOOKUP_TEXTS):
            for sequences in arguments.sequences:
                prompts = [texts.prompt(kind, number, arguments.answer) for number in range(sequences)]
                expected = [texts.answer(prompt, arguments.answer) for prompt in prompts]

                def checked(
                    options: SpeculationOptions | None,
                    kind: str = kind,
                    prompts: list[list[int]] = prompts,
                    expected: list[list[int]] = expected,
                ) -> Run:
                    run = measure(bench, prompts, arguments.answer, options)
                    if run.answers != expected:
                        raise SystemExit(f"{kind}: an answer is wrong")
                    return run

                yield compare(kind, partial(checked, None), partial(checked, options), arguments.runs)


def compare_pair(kind: str, arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of the demo pair. Rounding may differ between steps of other sizes, so answers may, too."""
    layers = arguments.layers if kind == "padded" else 0
    pair = demo_pair(layers, arguments.answer, arguments.drafts, threads=arguments.threads, dtype=arguments.dtype)
    with pair as both:
        for sequences in arguments.sequences:
            prompts = both.some_prompts(sequences * (1 + arguments.rounds))
            first, more = prompts[:sequences], prompts[sequences:]
            found = compare(
                kind,
                partial(measure, both.plain, first, arguments.answer, None, more),
                partial(measure, both.drafting, first, arguments.answer, both.options, more),
                arguments.runs,
            )
            yield replace(found, step_ratio=both.step_ratio)


def compare_all(arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of all texts, as they are measured."""
    if set(arguments.texts) & set(LOOKUP_TEXTS):
        yield from compare_by_lookup(arguments)
    for kind in (text for text in arguments.texts if text in PAIR_TEXTS):
        yield from compare_pair(kind, arguments)


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--shape", choices=tuple(SHAPES), default="50M", help="the model's shape (default 50M)")
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 32])
    options.add_argument("--texts", choices=(*LOOKUP_TEXTS, *PAIR_TEXTS), nargs="+", default=list(LOOKUP_TEXTS))
    options.add_argument(
        "--answer", type=int, default=256, help="the tokens of each answer (default 256; at most about 64 for a pair)"
    )
    options.add_argument("--layers", type=int, default=18, help="the further layers of padded (default 18)")
    options.add_argument(
        "--rounds", type=int, default=3, help="the further answers of each sequence of a pair (default 3)"
    )
    options.add_argument("--drafts", type=int, default=SpeculationOptions().max_tokens, help="--spec-tokens")
    options.add_argument("--runs", type=int, default=5, help="pairs of runs (default 5)")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--threads", type=int, default=len(usable_cpus()))
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    results: list[Result] = []
    for result in compare_all(arguments):
        print(f"{result.text}, {result.sequences} sequences: {result.ratio:.2f}", file=sys.stderr, flush=True)
        results.append(result)
    show_table(
        f"speculation, up to {arguments.drafts} drafts; lookup with {arguments.shape}, pairs with a draft model",
        [
            "text",
            "sequences",
            "plain tokens/s",
            "speculating",
            "ratio",
            "lowest",
            "tokens/step",
            "accepted",
            "step",
        ],
        [
            [
                result.text,
                str(result.sequences),
                f"{result.plain_tokens_per_second:,.0f}",
                f"{result.speculating_tokens_per_second:,.0f}",
                f"{result.ratio:.2f}",
                f"{result.lowest_ratio:.2f}",
                f"{result.tokens_per_step:.2f}",
                f"{result.accepted_share:.0%}",
                "" if result.step_ratio is None else f"{result.step_ratio:.1f}x",
            ]
            for result in results
        ],
        (
            f"dtype {arguments.dtype}, answers of {arguments.answer} tokens, {arguments.runs} pairs of runs",
            "step: the time of a target's step over the draft model's",
            machine(),
        ),
    )
    save(arguments.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
