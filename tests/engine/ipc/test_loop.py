"""The loop of the engine process, over a channel in memory."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from fake_runner import load_fake_model

from quire_engine.config import EngineConfig
from quire_engine.core.batch import StepOutput
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.core.stall_bound import StepCosts
from quire_engine.engine import Engine, make_engine
from quire_engine.ipc.loop import EngineLoop
from quire_engine.ipc.messages import (
    Cancel,
    FromEngine,
    Refused,
    ResetPrefixCache,
    Shutdown,
    Stats,
    StepExpected,
    Submit,
    ToEngine,
)


class Script:
    """A channel that returns one message per request of the loop, and ``Shutdown`` when the loop would wait."""

    def __init__(self, *messages: ToEngine | None) -> None:
        self.inbox = deque(messages)
        self.sent: list[FromEngine] = []

    def receive(self) -> ToEngine | None:
        return self.inbox.popleft() if self.inbox else None

    def wait(self) -> None:
        self.inbox.append(Shutdown())

    def wake(self) -> None:
        """Do nothing, because ``wait`` returns at once."""

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def submit(key: int, *, length: int = 20, max_tokens: int = 4, **params: Any) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return Submit(Request(key=key, prompt_token_ids=[1 + key] * length, params=sampling, seed=key))


def sibling(first: Submit, key: int) -> Submit:
    return Submit(replace(first.request, key=key, parent=first.request.key))


@pytest.fixture
def run(make_config: Callable[..., EngineConfig]) -> Callable[..., tuple[Script, Engine]]:
    def play(*messages: ToEngine | None, costs: StepCosts | None = None, **options: Any) -> tuple[Script, Engine]:
        config = make_config()
        model = replace(load_fake_model(config, **options), step_costs=costs)
        engine = make_engine(model, scheduler=config.scheduler)
        script = Script(*messages)
        EngineLoop(engine, script, hang_timeout_seconds=60.0, check_integrity=True).run()  # type: ignore[arg-type]
        return script, engine

    return play


Run = Callable[..., tuple[Script, Engine]]


def test_each_step_sends_its_columns(run: Run) -> None:
    script, _ = run(submit(1), submit(2, max_tokens=2))
    outputs = script.of(StepOutput)
    assert [message.keys for message in outputs] == [[1, 2], [1, 2], [1], [1]]
    assert [[ended.key for ended in message.finished] for message in outputs] == [[], [2], [], [1]]
    assert [message.first_scheduled_keys for message in outputs] == [[1, 2], [], [], []]
    assert [message.first_scheduled_cached for message in outputs] == [[0, 0], [], [], []]
    assert 0.0 < outputs[0].began < outputs[-1].began <= monotonic()


def test_arriving_request_joins_the_next_step(run: Run) -> None:
    script, _ = run(submit(1), None, submit(2), None)
    assert [message.keys for message in script.of(StepOutput)][:2] == [[1], [1, 2]]


def test_last_report_before_waiting_shows_an_idle_engine(run: Run) -> None:
    script, _ = run(submit(1))
    last = script.sent[-1]
    assert isinstance(last, Stats)
    assert (last.gauges.num_running, last.gauges.blocks_used) == (0, 0)
    assert (last.counters.generation_tokens, last.counters.prompt_tokens) == (4, 20)
    assert last.seconds.schedule > 0.0


def test_reports_count_prompts_once_per_family(run: Run) -> None:
    first = submit(1, length=30)
    script, _ = run(first, sibling(first, 2), submit(3, length=5000))
    assert script.of(Stats)[-1].received_prompt_tokens == 30 + 5000


def test_idle_engine_waits_and_repeats_nothing(run: Run) -> None:
    script, _ = run()
    assert len(script.sent) == 1


def test_reports_are_at_least_twenty_milliseconds_apart(run: Run) -> None:
    script, _ = run(submit(1, max_tokens=300))
    times = [report.time for report in script.of(Stats)][:-1]
    assert all(later - earlier >= 0.0199 for earlier, later in zip(times, times[1:], strict=False))
    assert len(times) < 300


def test_steps_that_are_expected_to_be_long_are_announced(run: Run) -> None:
    """A block of tokens takes 32 s here, more than a tenth of the hang timeout; decoding does not."""
    script, _ = run(submit(1, max_tokens=3), costs=StepCosts(fixed=1.0, per_token=2.0, per_pair=1e-9))
    kinds = [type(message) for message in script.sent if isinstance(message, StepExpected | StepOutput)]
    # 20 tokens are two steps, of which the first samples nothing but starts the request.
    assert kinds == [StepExpected, StepOutput, StepExpected, StepOutput, StepExpected, StepOutput, StepOutput]
    assert [round(message.seconds, 1) for message in script.of(StepExpected)] == [33.0, 9.0, 0.0]


def test_short_steps_are_not_announced(run: Run) -> None:
    script, _ = run(submit(1, length=600), costs=StepCosts(fixed=0.01, per_token=0.001, per_pair=1e-9))
    assert not script.of(StepExpected)


def test_request_that_cannot_fit_is_refused(run: Run) -> None:
    script, _ = run(submit(1, length=5000), submit(2))
    [refused] = script.of(Refused)
    assert refused.key == 1 and "at most 4095" in refused.message
    assert {key for message in script.of(StepOutput) for key in message.keys} == {2}


def test_cancelled_request_sends_no_more_output(run: Run) -> None:
    script, engine = run(submit(1, max_tokens=100), None, None, Cancel([1, 99]))
    assert sum(len(message.keys) for message in script.of(StepOutput)) == 2
    assert not engine.has_work


def test_prefix_cache_can_be_reset_by_message(run: Run) -> None:
    again = Submit(replace(submit(1).request, key=3))
    hits = [
        script.sent[-1].counters.prefix_cache_hits
        for script, _ in (
            run(submit(1), *[None] * 5, again),
            run(submit(1), *[None] * 5, ResetPrefixCache(), again),
        )
    ]
    assert hits == [16, 0]


def test_shutdown_ends_the_loop_with_running_requests(run: Run) -> None:
    script, engine = run(submit(1, max_tokens=100), None, Shutdown())
    assert engine.has_work
    assert len(script.of(StepOutput)) == 1


def test_answers_to_one_prompt_compute_it_once(run: Run) -> None:
    first = submit(1, length=600, max_tokens=1)
    others = [sibling(first, key) for key in (2, 3)]
    script, engine = run(first, *others)
    assert engine.counters.scheduled_tokens == 600 + 2 * (600 % 16)
    assert {ended.key for message in script.of(StepOutput) for ended in message.finished} == {1, 2, 3}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompt_logprobs_are_sent_during_prefill(run: Run, asynchronous: bool) -> None:
    script, _ = run(submit(1, length=600, prompt_logprobs=0), submit(2), asynchronous=asynchronous)
    reports = [report for message in script.of(StepOutput) for report in message.prompt_logprobs]
    assert {report.key for report in reports} == {1} and len(reports) >= 3
    assert max(len(report.entries) for report in reports) <= 256
    assert [entry.token_ids for report in reports for entry in report.entries] == [[2]] * 599


@pytest.mark.parametrize("asynchronous", [False, True])
def test_logprobs_are_aligned_with_their_tokens(run: Run, asynchronous: bool) -> None:
    script, _ = run(submit(1, logprobs=2), submit(2), asynchronous=asynchronous)
    for message in script.of(StepOutput):
        if 1 in message.keys:
            assert message.logprobs is not None and len(message.logprobs) == len(message.keys)
            place = message.keys.index(1)
            assert message.logprobs[place].token_ids[0] == message.token_ids[place]
            assert all(entry is None for index, entry in enumerate(message.logprobs) if index != place)
