"""Drafts on the device runner: verified in graphs of few tokens, with the tokens and logprobs that it has without."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixed_drafts import use_every_draft
from quire_parity import cases
from quire_parity.answering import Answering
from quire_parity.cases import Case

from quire_engine.config import (
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    ModelOptions,
    ServerOptions,
    SpeculationOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.engine import Engine, make_engine
from quire_engine.runner import load_model
from quire_engine.runner.captured import GraphSizes
from quire_kernels.dispatch import INTERPRETED

PROMPTS = ([4, 5] * 7, [5, 4, 4] * 5)
FEW = (4, 5)
PARAMS = (
    SamplingParams(max_tokens=6, temperature=0.0, allowed_token_ids=FEW, ignore_eos=True, prompt_logprobs=0),
    SamplingParams(max_tokens=7, temperature=9.0, allowed_token_ids=FEW, ignore_eos=True, logprobs=1),
)


def test_answers_are_those_without_drafts(start: Callable[..., Any], world: Any) -> None:
    """Only two tokens are probable, so that drafts are accepted; each sequence starts with one block of three."""
    world = replace(
        world,
        deterministic=True,
        overlap=False,
        num_blocks=3,
        num_swap_blocks=20,
        preemption_mode="swap",
        graph_sizes=GraphSizes(decode=(4,), mixed=(8, 16)),
    )
    plain, drafting = start(world), start(replace(world, drafts=3))
    for running in (plain, drafting):
        for key, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            running.add(key, prompt, params, seed=key)
        running.finish()
    assert drafting.tokens == plain.tokens
    for said, expected in ((drafting.logprobs, plain.logprobs), (drafting.prompt_logprobs, plain.prompt_logprobs)):
        assert said.keys() == expected.keys()
        for key, entries in expected.items():
            for one, other in zip(said[key], entries, strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    counters = drafting.engine.counters
    assert counters.draft_tokens > counters.accepted_tokens > 3
    assert +counters.preemptions
    assert counters.steps < plain.engine.counters.steps


def config_of(folder: Path, speculation: SpeculationOptions | None) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=folder, dtype="float32", load_format="dummy", max_model_len=32),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=16),
        server=ServerOptions(),
        device=DeviceOptions(device="cpu" if INTERPRETED else "cuda", deterministic=True),
        speculation=speculation,
        threads=1,
    )


def engine_of(wanted: EngineConfig) -> Engine:
    """Return an engine that verifies every draft for which there is room."""
    model = load_model(wanted)
    engine = make_engine(model, scheduler=wanted.scheduler, speculation=wanted.speculation)
    if wanted.speculation is not None:
        use_every_draft(engine._scheduler._speculation)
    return engine


def test_drafts_on_the_device_change_no_answer(tmp_path: Path) -> None:
    """The draft model has the target's weights, and is always right."""
    target = tmp_path / "target"
    cases.save(Case(family="llama", fields={"num_hidden_layers": 1}), target)
    options = SpeculationOptions(method="draft_model", model=target, max_tokens=2)
    answers = []
    for speculation in (None, options):
        wanted = config_of(target, speculation)
        engine = engine_of(wanted)
        running = Answering(engine)
        for key, temperature in enumerate((0.0, 1.0)):
            params = SamplingParams(max_tokens=5, temperature=temperature, ignore_eos=True)
            running.add(key, [5 + key, 6, 7], params, seed=key)
        running.finish()
        answers.append(running.tokens)
        counters = engine.counters
        engine.close()
    assert answers[0] == answers[1]
    assert counters.draft_tokens >= 4
    assert counters.accepted_tokens == counters.draft_tokens


def random_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Return requests with all kinds of parameters; those that edit no logits let the draft model be right."""
    chance = random.Random(7)
    choose = chance.choice
    return [
        (
            [chance.randrange(250) for _ in range(choose([3, 12, 14]))],
            SamplingParams(
                max_tokens=choose([1, 6, 11, 16]),
                temperature=choose([0.0, 0.5, 1.0]),
                top_k=choose([None, 5]),
                top_p=choose([1.0, 0.9]),
                presence_penalty=choose([0.0] * 5 + [1.0]),
                allowed_token_ids=choose([None, None, FEW]),
                stop_token_ids=choose([(), tuple(range(10, 40))]),
                min_tokens=choose([0] * 4 + [3]),
                logprobs=choose([None, 2]),
                prompt_logprobs=choose([None, None, 1]),
                ignore_eos=True,
            ),
        )
        for _ in range(count)
    ]


def test_random_requests_answer_as_without_drafts(tmp_path: Path) -> None:
    """Four sequences share a cache for two, so that some are preempted, and others are cancelled."""
    target = tmp_path / "target"
    cases.save(Case(family="llama", fields={"num_hidden_layers": 1}), target)
    options = SpeculationOptions(method="draft_model", model=target, max_tokens=3)
    requests = random_requests(12)
    answers: list[dict[int, Any]] = []
    for speculation in (None, options):
        wanted = config_of(target, speculation)
        # A block of the model's layer has 4,096 bytes; the draft model has another layer.
        cache_bytes = 3 * 4096 * (1 if speculation is None else 2)
        wanted = replace(
            wanted,
            cache=CacheOptions(kv_cache_memory_bytes=cache_bytes, swap_space_bytes=1 << 18),
            scheduler=replace(wanted.scheduler, max_num_seqs=4, max_num_batched_tokens=24, preemption_mode="swap"),
        )
        engine = engine_of(wanted)
        running = Answering(engine)
        for key, (prompt, params) in enumerate(requests):
            running.add(key, prompt, params, seed=key * 31)
            if key % 4 == 3:
                for _ in range(3):
                    running.step()
                engine.cancel(key)
        running.finish()
        answers.append(
            {
                key: (running.tokens[key], [entry.token_ids for entry in running.logprobs[key]])
                for key in range(len(requests))
                if key % 4 != 3
            }
        )
        assert +engine.counters.preemptions
        if speculation is not None:
            assert 0 < engine.counters.accepted_tokens < engine.counters.draft_tokens
        engine.close()
    assert answers[0] == answers[1]
