"""Small setups of the core: a cache layout, an engine with the checking runner, and the expected answers."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import pytest
from fake_runner import FakeForward, FakeRunner, draw, next_digest

from quire_engine.core.batch import Batch, FinishedSequence, StepOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, PolicyName, PreemptionMode, SchedulerOptions, SharePrefixes
from quire_engine.core.ports import AdapterStore
from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request, Sequence
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StallBound, StepCosts
from quire_engine.engine import Engine

EOS = 0


@dataclass
class World:
    """An engine and the tokens of its sequences so far."""

    engine: Engine
    scheduler: Scheduler
    runner: FakeRunner
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedSequence] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """The sequences, also those that have ended; without those that still wait for an adapter."""
    cached: dict[int, int] = field(default_factory=dict)
    """The prompt tokens that were found in the prefix cache, for sequences that have run."""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """Prompt tokens whose logprobs were reported."""
    pooled: dict[int, list[list[float]]] = field(default_factory=dict)
    """The parts of the prompts that were pooled: the number of tokens, their sum, and that of their positions."""

    def add(
        self,
        key: int,
        prompt: Many[int],
        *,
        max_tokens: int = 8,
        params: SamplingParams | None = None,
        priority: int = 0,
        salt: str | None = None,
        parent: int | None = None,
        tenant: str | None = None,
        gateway_tenant: str | None = None,
        adapter: int | None = None,
    ) -> str | None:
        params = params or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        refusal = self.engine.add(
            Request(
                key=key,
                prompt_token_ids=list(prompt),
                params=params,
                seed=key,
                priority=priority,
                tenant=tenant,
                gateway_tenant=gateway_tenant,
                cache_salt=salt,
                parent=parent,
                adapter=adapter,
            )
        )
        self.sequences |= self.scheduler._sequences
        return refusal

    def step(self) -> StepOutput | None:
        step = self.engine.step()
        self.engine.check_integrity()
        if step is not None:
            for report in step.prompt_logprobs:
                assert report.key not in self.tokens and report.key not in self.finished, "reported after the prompt"
                self.reported.setdefault(report.key, []).extend(entry.token_ids[0] for entry in report.entries)
            for part in step.pooled:
                assert part.key not in self.finished, "pooled after the end"
                self.pooled.setdefault(part.key, []).append(list(array("f", part.values)))
            for key, token_id in zip(step.keys, step.token_ids, strict=True):
                assert key not in self.finished
                self.tokens.setdefault(key, []).append(token_id)
            self.finished.update({ended.key: ended for ended in step.finished})
            self.cached |= zip(step.first_scheduled_keys, step.first_scheduled_cached, strict=True)
        return step

    def record(self) -> list[Batch]:
        """Return a list that collects the batches of later steps."""
        batches: list[Batch] = []
        execute = self.runner.execute

        class Recorder:
            def execute(self, batch: Batch) -> FakeForward:
                batches.append(batch)
                return execute(batch)

        self.engine._runner = Recorder()  # type: ignore[assignment]
        return batches

    def run(self, most_steps: int = 5000) -> None:
        """Run until no work is left."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps")


def make_world(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Many[int | None] = (None,),
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 200,
    overlap: bool = False,
    caching: bool = True,
    share: SharePrefixes = "tenant",
    policy: PolicyName = "fcfs",
    vocab_size: int = 50,
    num_swap_blocks: int = 0,
    preemption_mode: PreemptionMode = "auto",
    rates: MeasuredRates | None = None,
    positions: int = 256,
    max_stall: float = 0.0,
    max_step: float | None = None,
    step_costs: StepCosts | None = None,
    tokens_at_once: int = 1,
    speculation: Speculation | None = None,
    adapter_slots: int = 0,
    adapters: AdapterStore | None = None,
    pools: bool = False,
    stages: int = 1,
) -> World:
    """Return a function that creates a ``World``.

    ``max_stall`` is the stall bound and ``max_step`` that of steps without decoding, in seconds of the runner's
    ``token_seconds``; 0 and None mean no bound.
    """
    layout = KVCacheLayout(
        block_size=block_size,
        groups=tuple(
            KVCacheGroup(layers=(index,), num_blocks=num_blocks, window=window, num_swap_blocks=num_swap_blocks)
            for index, window in enumerate(windows)
        ),
    )
    options = SchedulerOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        enable_prefix_caching=caching,
        share_prefixes=share,
        preemption_mode=preemption_mode,
    )
    model = ModelTraits(
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        max_prompt_logprobs_positions=positions,
        adapter_slots=adapter_slots,
        pools=pools,
        stages=stages,
    )
    seconds = max_stall or max_step
    bound = None
    if seconds is not None and seconds > 0.0:
        bound = StallBound(seconds, at_least=block_size, costs=step_costs, alone_seconds=max_step)
    scheduler = Scheduler(options, model, layout, rates, bound, speculation)
    runner = FakeRunner(layout=layout, vocab_size=vocab_size, tokens_at_once=tokens_at_once)
    engine = Engine(scheduler=scheduler, runner=runner, adapters=adapters, overlap=overlap, stages=stages)
    return World(engine, scheduler, runner)


def expected_tokens(prompt: Many[int], params: SamplingParams, *, vocab_size: int, max_model_len: int) -> list[int]:
    """Return the fake model's answer to a prompt, computed without an engine."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    digest = 0
    for token_id in prompt:
        digest = next_digest(digest, token_id)
    answer: list[int] = []
    while len(answer) < params.max_tokens and len(prompt) + len(answer) < max_model_len:
        answer.append(draw(digest, vocab_size))
        if answer[-1] in stops and len(answer) > params.min_tokens:
            break
        digest = next_digest(digest, answer[-1])
    return answer


@pytest.fixture(scope="session", name="make_world")
def make_world_fixture() -> Callable[..., World]:
    return make_world


@pytest.fixture(scope="session", name="expected_tokens")
def expected_tokens_fixture() -> Callable[..., list[int]]:
    return expected_tokens
