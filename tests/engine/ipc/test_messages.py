"""Messages between the processes arrive unchanged."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.config import EngineConfig, ModelOptions
from quire_engine.core.batch import FinishedSequence, PooledPart, PromptLogprobs, StepOutput, TokenLogprobs
from quire_engine.core.sampling_params import Pooling, ReasoningPhase, SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.grammar.spec import Vocabulary
from quire_engine.ipc.messages import (
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    Connected,
    Failed,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    ResetPrefixCache,
    RunnerFactory,
    SetVocabulary,
    Shutdown,
    StartUp,
    Stats,
    Submit,
    ToEngine,
    UnloadAdapter,
)

ODD = SamplingParams(
    reasoning_phase=ReasoningPhase(start_token_id=5, end_token_id=6, opened=True, optional=False, budget=7),
    max_tokens=5,
    grammar="start: /a+/",
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    typical_p=0.8,
    seed=2**62,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.3,
    logit_bias=((3, -1.5), (4, 2.0)),
    allowed_token_ids=(3, 4, 5),
    bad_words_token_ids=((5,), (3, 4)),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    min_tokens=2,
    logprobs=3,
    prompt_logprobs=1,
    pooling=Pooling(mean=True),
)
LISTS = {each.name for each in fields(Gauges) if each.default_factory is not MISSING}


def test_sampling_params_survive_serialization() -> None:
    defaults = SamplingParams(max_tokens=0)
    assert all(getattr(ODD, field.name) != getattr(defaults, field.name) for field in fields(SamplingParams))
    sent = msgspec.msgpack.encode(ODD)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == ODD


@pytest.mark.parametrize(
    ("message", "way"),
    [
        (
            Submit(Request(key=1, prompt_token_ids=[1, 2], params=ODD, seed=2**62, tenant="t", parent=3)),
            ToEngine,
        ),
        (Cancel([1, 2]), ToEngine),
        (ResetPrefixCache(), ToEngine),
        (SetVocabulary(Vocabulary(tokens=[b"a", b"\xff"], special_tokens={"<e>": 1}, eos_token_ids=(1,))), ToEngine),
        (Shutdown(), ToEngine),
        (
            StepOutput(
                began=0.5,
                keys=[1, 2],
                token_ids=[3, 4],
                logprobs=[None, TokenLogprobs([4, 5], [-0.1, -2.0], 1)],
                finished=[FinishedSequence(1, "stop", 3)],
                first_scheduled_keys=[2],
                first_scheduled_cached=[16],
                prompt_logprobs=[PromptLogprobs(2, [TokenLogprobs([9, 8], [-0.5, -0.6], 1)])],
                pooled=[PooledPart(2, b"abcd")],
            ),
            FromEngine,
        ),
        (
            Stats(
                time=2.0,
                last_step_time=1.5,
                gauges=Gauges(**{field.name: [7] if field.name in LISTS else 7 for field in fields(Gauges)}),  # type: ignore[arg-type]
                counters=Counters(steps=3, preemptions={"swap:cheaper": 2}),
                seconds=StepSeconds(run=0.5),
                received_prompt_tokens=9,
            ),
            FromEngine,
        ),
        (Connected(), FromEngine),
        (LoadAdapter(3, "/adapters/fr"), ToEngine),
        (UnloadAdapter(3), ToEngine),
        (AdapterLoaded(3, 8, 1000), FromEngine),
        (AdapterFailed(3, AdapterFailure.RANK_TOO_HIGH, "rank 64"), FromEngine),
        (Refused(1, "too long"), FromEngine),
        (Failed("no model"), FromEngine),
        (
            Ready(
                pid=1,
                model_bytes=2,
                kv_cache_bytes=3,
                num_blocks=4,
                block_size=5,
                max_model_len=6,
                dtype="float32",
                weights="fp16",
                phase_seconds={"weights": 0.5},
                eos_token_ids=(7, 8),
            ),
            FromEngine,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_message_arrives_as_it_was_sent(message: Any, way: Any) -> None:
    assert type(message) in get_args(way)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=way)
    assert type(arrived) is type(message) and arrived == message


def test_configuration_survives_serialization_to_the_engine(make_config: Callable[..., EngineConfig]) -> None:
    config = make_config(policy="priority")
    wanted = StartUp(address="ipc:///tmp/x", began=2.5, config=config, factory=RunnerFactory(options={"num_blocks": 3}))
    line = wanted.encode()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert StartUp.decode(line) == wanted
    assert StartUp.decode(line).config.model == ModelOptions(path=Path("/nowhere/model"))


def test_configuration_selects_the_real_runner_by_default() -> None:
    assert RunnerFactory().function == "quire_engine.runner:load_model"
