"""The fixture of every parity table: ``parity.check(case, schedule)``. A table is a dict of ``Case``, a row a model."""

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import pytest
from quire_parity import cases
from quire_parity.cases import Case, models_of
from quire_parity.engines import ALONE, Heard, ask, block_bytes, cache_options, config_of, follow, start
from quire_parity.reference import Answer, Tally, compare, generate, load_reference
from quire_parity.schedules import SCHEDULES, Schedule, Seen

from quire_engine.config import CacheOptions, ParallelOptions
from quire_engine.core.options import SchedulerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    folder: Path
    prompts: list[list[int]]
    answers: list[Answer]
    block_bytes: int


@dataclass(slots=True)
class Parity:
    """A cache of each case's checkpoint and reference answers."""

    root: Path
    prepared: dict[int, Prepared] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def check(self, case: Case, schedule: Schedule, parallel: ParallelOptions = ALONE) -> None:
        """Assert the reference's tokens and probabilities, and that the schedule's purpose really occurred."""
        ready = self.prepare(case)
        block_bytes = ready.block_bytes
        if parallel.tensor > 1:
            # A rank has a block of its own KV heads only.
            kv_heads = case.fields.get("num_key_value_heads", 2)
            block_bytes = block_bytes * max(1, kv_heads // parallel.tensor) // kv_heads
        block_bytes //= parallel.pipeline
        config = config_of(
            ready.folder,
            max_model_len=case.max_model_len,
            scheduler=schedule.scheduler,
            cache=cache_options(schedule, block_bytes),
            parallel=parallel,
        )
        engine = start(config)
        rounds, seen = follow(engine, ready.prompts, schedule)
        engine.close()
        assert schedule.forced(seen), seen
        for number, heard in enumerate(rounds):
            for prompt, answer, one in zip(ready.prompts, ready.answers, heard, strict=True):
                what = f"{case.family}, prompt of {len(prompt)}, round {number}"
                compare(answer, one.token_ids, one.logprobs, self.tally, what)

    def check_bfloat16(self, case: Case) -> None:
        """Assert that bfloat16 is finite and close to float32 in the next token of every prompt with equal choices."""
        ready = self.prepare(case)
        config = config_of(
            ready.folder,
            max_model_len=case.max_model_len,
            scheduler=SchedulerOptions(max_num_seqs=16),
            cache=CacheOptions(kv_cache_memory_bytes=100 * ready.block_bytes),
            dtype="bfloat16",
        )
        engine = start(config)
        heard = ask(engine, enumerate(ready.prompts), Seen())
        engine.close()
        assert all(isfinite(logprob) for one in heard.values() for logprob in one.logprobs)
        pairs = list(zip(ready.answers, heard.values(), strict=True))
        errors = [_error(answer, one) for answer, one in pairs if answer.token_ids[0] == one.token_ids[0]]
        assert 2 * len(errors) >= len(pairs), f"bfloat16 agrees on {len(errors)} of {len(pairs)} tokens"
        assert sum(errors) / len(errors) <= case.bfloat16_error, errors

    def prepare(self, case: Case) -> Prepared:
        if id(case) not in self.prepared:
            folder = self.root / f"{len(self.prepared)}-{case.family}"
            cases.save(case, folder)
            prompts = cases.prompts(case.lengths)
            reference = load_reference(folder, case.attention, models_of(case))
            probe = config_of(
                folder,
                max_model_len=case.max_model_len,
                scheduler=SchedulerOptions(max_num_seqs=1),
                cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
            )
            self.prepared[id(case)] = Prepared(
                folder=folder,
                prompts=prompts,
                answers=[generate(reference, prompt) for prompt in prompts],
                block_bytes=block_bytes(probe),
            )
        return self.prepared[id(case)]


def _error(answer: Answer, heard: Heard) -> float:
    return abs(answer.logprobs[0] - heard.logprobs[0])


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    return Parity(tmp_path_factory.mktemp("parity"))


@pytest.fixture(params=SCHEDULES.values(), ids=list(SCHEDULES))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    chosen: Schedule = request.param
    return chosen
