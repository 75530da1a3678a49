"""A step is schedule, execute, commit; with overlap, the commit is that of the step before."""

from typing import Any

import pytest
from fake_runner import load_fake_model

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.batch import StepOutput
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine


def engine(**options: Any) -> Engine:
    config = EngineConfig(
        model=ModelOptions(path=None),  # type: ignore[arg-type]  # nothing is loaded
        cache=CacheOptions(),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
        server=ServerOptions(),
        threads=1,
    )
    model = load_fake_model(config, verify=True, **options)
    return make_engine(model, scheduler=config.scheduler)


def request(key: int, *, max_tokens: int = 4, logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return Request(key=key, prompt_token_ids=[1, 2, 3], params=params, seed=0)


def run(here: Engine) -> list[StepOutput | None]:
    steps = []
    while here.has_work:
        steps.append(here.step())
    return steps


@pytest.mark.parametrize(("asynchronous", "idle_first"), [(False, False), (True, True)])
def test_asynchronous_runner_is_scheduled_one_step_ahead(asynchronous: bool, idle_first: bool) -> None:
    here = engine(asynchronous=asynchronous)
    here.add(request(1))
    steps = run(here)
    assert (steps[0] is None) == idle_first
    assert [step.keys for step in steps if step is not None] == [[1]] * 4


def test_discarded_samples_drop_their_logprobs() -> None:
    here = engine(asynchronous=True, vocab_size=4, eos_token_ids=(1,))
    for key in range(3):
        params = SamplingParams(max_tokens=30, logprobs=2)
        here.add(Request(key=key, prompt_token_ids=[key], params=params, seed=0))
    for step in run(here):
        if step is not None and step.logprobs is not None:
            drawn = [entry.token_ids[0] for entry in step.logprobs if entry is not None]
            assert drawn == step.token_ids and len(step.keys) == len(step.token_ids)
    assert here.counters.discarded_tokens > 0


def test_seconds_of_a_step_are_counted_by_part() -> None:
    here = engine(step_seconds=0.01)
    here.add(request(1))
    run(here)
    assert here.seconds.run >= 4 * 0.01
    assert here.seconds.schedule > 0 and here.seconds.output > 0
    here.reset_counters()
    assert here.seconds.run == 0 and here.counters.steps == 0


def test_steps_have_timestamps() -> None:
    here = engine()
    here.add(request(1))
    step = here.step()
    assert step is not None and 0.0 < step.began <= here.last_step_time
