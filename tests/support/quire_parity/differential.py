"""A differential run against transformers: random greedy requests in mixed batches, for a tiny model of every family.

    PYTHONPATH=tests/support python -m quire_parity.differential [--requests 40] [--seed 0] [NAME ...]

A model in float32 gets requests with shared prefixes while others run, with few tokens in a step and few blocks of KV
cache, so that prompts are computed in parts, found in the prefix cache and preempted in both modes. Then one forward
pass of transformers over each prompt with its answer says how far each sampled token's logit is below the best, and
how far each reported logprob is from its own. NAME selects the models whose names contain it. `make soak` runs all.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from quire_parity.answering import Answering
from quire_parity.backend import CASES as BACKEND
from quire_parity.cases import VOCABULARY, Case, models_of, save
from quire_parity.engines import block_bytes, config_of, start
from quire_parity.native import CASES as NATIVE
from quire_parity.native import WHOLE
from quire_parity.reference import load_reference
from transformers import PreTrainedModel
from transformers.utils import logging

from quire_engine.config import CacheOptions
from quire_engine.core.batch import TokenLogprobs
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams

CASES = {**NATIVE, **WHOLE, **BACKEND}
MODES = ("recompute", "swap")
LIMIT = 2e-3
"""The largest gap below the best logit, and the largest error of a logprob."""
_LONGEST_PROMPT, _LONGEST_ANSWER = 64, 24
_BLOCKS = 12
"""The blocks of every layer: two of the longest sequences, of which eight run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The largest differences from transformers, and what occurred on the way."""

    name: str
    requests: int
    tokens: int
    gap: float
    """The most that a sampled token's logit is below the best."""
    error: float
    """The largest difference of a logprob: of sampled tokens, of the most probable ones, and of prompts."""
    preemptions: dict[str, int]
    prefix_cache_hits: int

    @property
    def problems(self) -> list[str]:
        """The differences that are too large, and the paths that the run has not tried."""
        problems = [
            f"{label} {found:.2e}" for label, found in (("gap", self.gap), ("error", self.error)) if not found <= LIMIT
        ]
        problems += [f"no preemption by {mode}" for mode in MODES if not self.preemptions[mode]]
        return problems if self.prefix_cache_hits else [*problems, "no prefix hits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    prompt: list[int]
    params: SamplingParams
    after: int
    """The step before which it arrives."""


def compare(name: str, *, requests: int, seed: int) -> Result:
    """Run a model of ``CASES`` in both modes of preemption."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        save(case, Path(folder))
        reference = load_reference(Path(folder), case.attention, models_of(case))
        asked = _requests(case, requests, random.Random(seed))
        gap = error = 0.0
        preemptions, hits, tokens = dict.fromkeys(MODES, 0), 0, 0
        for mode in MODES:
            running = _run(case, Path(folder), asked, mode)
            for key, one in enumerate(asked):
                tokens += len(running.tokens[key])
                gaps, errors = _differences(reference, one, running, key)
                gap, error = max(gap, gaps), max(error, errors)
            counters = running.engine.counters
            hits += counters.prefix_cache_hits
            for label, count in counters.preemptions.items():
                preemptions[label.partition(":")[0]] += count
            running.engine.close()
    return Result(
        name=name,
        requests=len(MODES) * len(asked),
        tokens=tokens,
        gap=gap,
        error=error,
        preemptions=preemptions,
        prefix_cache_hits=hits,
    )


def _requests(case: Case, count: int, numbers: random.Random) -> list[_Asked]:
    """Return requests whose prompts begin with one of three texts, some of them whole."""
    stems = [[numbers.randrange(3, VOCABULARY) for _ in range(_LONGEST_PROMPT)] for _ in range(3)]
    asked = []
    for number in range(count):
        length = numbers.randint(min(case.lengths), _LONGEST_PROMPT)
        own = numbers.choice([0, 0, numbers.randint(0, length)])
        prompt = numbers.choice(stems)[: length - own] + [numbers.randrange(3, VOCABULARY) for _ in range(own)]
        params = SamplingParams(
            max_tokens=numbers.randint(1, _LONGEST_ANSWER),
            temperature=0.0,
            ignore_eos=True,
            logprobs=numbers.choice([0, 5]),
            prompt_logprobs=3 if number % 5 == 0 else None,
        )
        asked.append(_Asked(prompt=prompt, params=params, after=number // 2))
    return asked


def _run(case: Case, folder: Path, asked: list[_Asked], mode: str) -> Answering:
    scheduler = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=48, preemption_mode=mode)
    probe = config_of(
        folder,
        max_model_len=case.max_model_len,
        scheduler=scheduler,
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
    )
    bytes_of_all = _BLOCKS * block_bytes(probe)
    cache = CacheOptions(
        kv_cache_memory_bytes=bytes_of_all,
        swap_space_bytes=4 * bytes_of_all if mode == "swap" else 0,
    )
    running = Answering(start(config_of(folder, max_model_len=case.max_model_len, scheduler=scheduler, cache=cache)))
    waiting, steps = dict(enumerate(asked)), 0
    while waiting or running.engine.has_work:
        for key in [key for key, one in waiting.items() if one.after <= steps]:
            one = waiting.pop(key)
            running.add(key, one.prompt, one.params)
        if running.engine.has_work:
            running.step()
        steps += 1
    return running


@torch.inference_mode()
def _differences(reference: PreTrainedModel, asked: _Asked, running: Answering, key: int) -> tuple[float, float]:
    """Return the largest gap and the largest error of one answer."""
    answer = running.tokens[key]
    ids = asked.prompt + answer
    logits = reference(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0].float()
    own = logits[len(asked.prompt) - 1 : -1]  # [answer, vocabulary]
    gap = float((own.max(dim=1).values - own[range(len(answer)), answer]).max())
    logprobs = logits.log_softmax(dim=1)
    error = _error(logprobs[len(asked.prompt) - 1 :], running.logprobs[key], answer)
    if asked.params.prompt_logprobs is not None:
        error = max(error, _error(logprobs, running.prompt_logprobs.get(key, []), asked.prompt[1:]))
    return gap, error


def _error(logprobs: torch.Tensor, reported: list[TokenLogprobs], tokens: list[int]) -> float:
    """Return the largest error of the entries, which belong to these tokens."""
    assert [entry.token_ids[0] for entry in reported] == tokens
    return max(
        (
            abs(found - float(row[token]))
            for row, entry in zip(logprobs, reported, strict=False)
            for token, found in zip(entry.token_ids, entry.logprobs, strict=True)
        ),
        default=0.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--requests", type=int, default=40, help="in each mode of preemption; default: 40")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    chosen = [name for name in CASES if not arguments.names or any(part in name for part in arguments.names)]
    print(f"{'model':44} requests tokens  worst gap  logprob  recompute swap  hits", flush=True)
    failed = not chosen
    for name in chosen:
        found = compare(name, requests=arguments.requests, seed=arguments.seed)
        counts = [found.preemptions[mode] for mode in MODES]
        print(
            f"{name:44} {found.requests:8} {found.tokens:6} {found.gap:10.1e} {found.error:8.1e}"
            f" {counts[0]:10} {counts[1]:4} {found.prefix_cache_hits:5} {'; '.join(found.problems)}",
            flush=True,
        )
        failed |= bool(found.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
