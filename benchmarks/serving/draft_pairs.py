"""The demo model as target, with its draft model, for ``benchmarks.serving.speculation``.

Prompts are questions that the models know, and each answer is as long as the measurement needs. The target is the demo
model itself, or the same with further layers of no effect, so that its step costs a multiple of the draft's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.models.variants import write_padded_model
from benchmarks.serving.steps import Bench, time_steps
from quire_engine.config import DType, SpeculationOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
DRAFT = MODELS / "quire-demo-draft"
SUBJECTS = (
    *("list comprehensions", "the with statement", "generators", "str.split()", "lambda expressions", "dictionaries"),
    *("the try statement", "the for statement", "class definitions", "function definitions", "the import statement"),
    *("sequence types", "mappings", "sets", "the assert statement", "boolean operations", "comparisons", "slicings"),
    *("attribute references", "the del statement", "numeric literals", "string literals", "truth value testing"),
    *("exceptions", "the while statement", "context managers", "the yield statement", "naming and binding"),
    *("the raise statement", "the return statement", "conditional expressions", "special method names"),
)
_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target without a draft model and with one, and prompts whose answers are long enough."""

    plain: Bench
    drafting: Bench
    options: SpeculationOptions
    prompts: list[list[int]]
    step_ratio: float
    """The time of a target's decode step over the draft model's, of one sequence."""

    def some_prompts(self, count: int) -> list[list[int]]:
        return list(islice(cycle(self.prompts), count))


@contextmanager
def demo_pair(layers: int, answer: int, drafts: int, *, threads: int, dtype: DType) -> Iterator[Pair]:
    """Load the demo pair, with ``layers`` further layers in the target, for answers of ``answer`` tokens."""
    options = SpeculationOptions(method="draft_model", model=DRAFT, max_tokens=drafts)
    with TemporaryDirectory(prefix="quire-padded-") as name:
        target = Path(name)
        write_padded_model(target, MODELS / "quire-demo", layers)

        def bench(folder: Path, speculation: SpeculationOptions | None = None) -> Bench:
            return Bench(folder, threads=threads, dtype=dtype, kv_cache_bytes=2**29, speculation=speculation)

        plain = bench(target)
        yield Pair(
            plain=plain,
            drafting=bench(target, options),
            options=options,
            prompts=_prompts(plain, target, answer),
            step_ratio=_step_seconds(plain) / _step_seconds(bench(DRAFT)),
        )


def _prompts(bench: Bench, target: Path, answer: int) -> list[list[int]]:
    """Return the prompts whose answer has at least ``answer`` tokens; raise SystemExit without any."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    prompts = []
    for subject in SUBJECTS:
        messages = [{"role": "user", "content": f"Explain {subject}."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    engine = make_engine(bench.model, scheduler=bench.config.scheduler)
    params = SamplingParams(max_tokens=answer, temperature=0.0)
    for key, prompt in enumerate(prompts):
        engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0))
    counted = [0] * len(prompts)
    while engine.has_work:
        done = engine.step()
        for key in [] if done is None else done.keys:
            counted[key] += 1
    long = [prompt for prompt, count in zip(prompts, counted, strict=True) if count == answer]
    if not long:
        raise SystemExit(f"no answer of the demo model has {answer} tokens: lower --answer")
    return long


def _step_seconds(bench: Bench) -> float:
    times = time_steps(bench.decoding(1, 64, 2 * _STEPS), 2 * _STEPS)
    return median(time.wall_seconds for time in times[_STEPS:])
