"""Any schedule on the runner answers like a request alone: padded graphs, overlap, drafts, swap, shared blocks.

The model reads back its cache: it stores each token and its position, and its output depends on everything that a query
sees there through the block tables and slots of the runner. So a wrong block, a padded row that touches another's, a
token fed back too early or a block swapped too late changes the answer, which is known beforehand. It runs with the
steps of a CPU and with those of a GPU: on one if there is one, with captured graphs and streams.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixed_drafts import use_every_draft
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, PreemptionMode, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.core.speculation.proposers import OpenProposer
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.engine import Engine
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.accelerator import (
    Accelerator,
    CpuAccelerator,
    EagerGraph,
    Mark,
    make_accelerator,
)
from quire_engine.runner.captured import GraphSizes, default_decode_sizes, default_mixed_sizes
from quire_engine.runner.model_runner import DraftParts, ModelRunner, RunnerParts
from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.paged_attention.cpu_plan import CpuPlan
from quire_kernels.paged_attention.plan import DevicePlan

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
BLOCK_SIZE = 16
VOCABULARY = 7
MAX_MODEL_LEN = 60
PRIME = 10_007
Windows = tuple[int | None, ...]


def weight(position: Any, group: int) -> Any:
    return (position * 7_919 + group * 31 + 13) % 1_009


def answer(prompt: list[int], params: SamplingParams, windows: Windows) -> list[int]:
    """Return the model's answer to a prompt within the limits of the request."""
    known = list(prompt)
    limit = min(len(prompt) + params.max_tokens, MAX_MODEL_LEN)
    while len(known) < limit:
        total = 0
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, len(known) - window)
            total += sum((known[i] + 1) * weight(i, group) for i in range(first, len(known)))
        known.append(total % PRIME % VOCABULARY)
        if known[-1] in params.stop_token_ids:
            break
    return known[len(prompt) :]


def wanted_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """Return the ``rows`` [R] of hidden states [T, 2]; as a real model, leave them unread if there are T of them."""
    return hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)


@dataclass(frozen=True, slots=True)
class ReadBackModel:
    """A model with one layer per group. T queries, B sequences, L token slots that block tables reach.

    Its hidden states are the next token and the own one. A draft model may be ``wrong`` after one of so many positions.
    """

    wrong: int = 0

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        return self.logits(self.hidden_states(inputs, caches))

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden[:, :1] == torch.arange(VOCABULARY, device=hidden.device)).float()

    def hidden_states(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the hidden states [R, 2]."""
        for group, cache in zip(inputs.groups, caches, strict=True):
            stored = torch.stack((inputs.token_ids, inputs.positions), dim=1).float()
            cache.values.view(-1, cache.values.shape[-1])[:, :2].index_copy_(0, group.slots, stored)
        total = torch.zeros_like(inputs.token_ids)
        for index, (group, cache) in enumerate(zip(inputs.groups, caches, strict=True)):
            total += self.read(index, group.plan, inputs.positions, cache)
        token = total % PRIME
        if self.wrong:
            token += inputs.positions % self.wrong == 0
        return wanted_rows(torch.stack((token % VOCABULARY, inputs.token_ids), dim=1).float(), inputs.logits_rows)

    def read(self, index: int, plan: Any, positions: Tensor, cache: KVCache) -> Tensor:
        queries = torch.arange(len(positions), device=positions.device)
        plan = plan if isinstance(plan, DevicePlan) else seen_by(plan)
        ends = plan.query_starts[1:].long()
        # [T]; tokens of padding have no owner, and what is computed for them is not read.
        owner = torch.searchsorted(ends, queries, right=True).clamp(max=len(ends) - 1)
        slots = plan.block_tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=positions.device)
        read = cache.values.view(-1, cache.values.shape[-1]).index_select(0, slots.reshape(-1))[:, :2]
        tokens, stored_at = read.view(len(ends), -1, 2)[owner].unbind(2)  # [T, L]
        place = torch.arange(tokens.shape[1], device=positions.device)
        seen = place <= positions[:, None]
        if plan.window is not None:
            seen &= place > positions[:, None] - plan.window
        found = ((tokens.nan_to_num(0.0).long() + 1) * weight(place, index) * seen).sum(dim=1)
        # A value in a wrong place must not give the right answer by chance.
        wrong = (seen & (stored_at != place)).sum(dim=1)
        wrong += positions != plan.context_lens.long()[owner] - (ends[owner] - queries)
        return found + wrong * 3_001


def seen_by(plan: CpuPlan) -> Any:
    """Return what a CPU's plan says about each sequence, in the words of a GPU's."""
    block_tables, tiles, _ = plan._kept
    owners, firsts, tokens, ends = tiles[:4]
    contexts, starts = np.zeros(len(block_tables), dtype=np.int64), np.zeros(len(block_tables) + 1, dtype=np.int64)
    np.maximum.at(contexts, owners, ends)
    np.maximum.at(starts, owners + 1, firsts + tokens)
    reach = int(plan._numbers[8])
    return SimpleNamespace(
        block_tables=block_tables,
        context_lens=torch.from_numpy(contexts),
        query_starts=torch.from_numpy(starts),
        window=reach if reach < MAX_MODEL_LEN else None,
    )


def default_sizes(max_rows: int, budget: int, *, verifies: bool) -> GraphSizes:
    """Return the sizes that a start captures by default."""
    return GraphSizes(
        decode=default_decode_sizes(max_rows), mixed=default_mixed_sizes(budget, verifies=verifies)
    ).within(sequences=max_rows, tokens=budget)


def draft_of(world: "World") -> DraftParts | None:
    if world.drafter == "oracle":
        return None
    return DraftParts(model=ReadBackModel(wrong=world.wrong), layers=1, max_tokens=max(1, world.drafts))


@dataclass
class LateMark:
    """A mark whose downloads become readable when it is waited for."""

    arriving: list[tuple[Tensor, Tensor]]

    @torch.inference_mode()
    def wait(self) -> None:
        for target, source in self.arriving:
            target.copy_(source)

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class LateAccelerator(CpuAccelerator):
    """A CPU whose downloads contain garbage until the host waits, as on a slow device."""

    under_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def download(self, tensor: Tensor) -> Tensor:
        target = torch.full_like(tensor, 123_456)
        self.under_way.append((target, tensor.clone()))
        return target

    def mark(self) -> LateMark:  # type: ignore[override]
        arriving = list(self.under_way)
        self.under_way.clear()
        return LateMark(arriving)

    def capture(self, work: Callable[[], None]) -> EagerGraph:
        work()
        return EagerGraph(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    num_blocks: int
    num_swap_blocks: int
    windows: Windows
    max_rows: int
    budget: int
    overlap: bool
    caching: bool
    graph_sizes: GraphSizes
    preemption_mode: PreemptionMode
    drafts: int = 0
    """The most drafts of a sequence; 0 runs without speculation."""
    plain_steps: int = 0
    """The steps without drafts between two steps with drafts each; 0 has drafts in all steps."""
    drafter: str = "oracle"
    """The source of drafts; for a draft model, there is one group of layers, and the last one is its own."""
    wrong: int = 0
    """See ``ReadBackModel``."""
    is_device: bool = True
    """Steps are those of a GPU, with staged inputs and captured graphs, or those of a CPU."""

    @property
    def most_drafts(self) -> int:
        return min(self.drafts * self.max_rows, 9)


@dataclass(frozen=True, slots=True)
class Oracle:
    """A ``Proposer`` that is right, except about every seventh token."""

    windows: Windows

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        params = SamplingParams(max_tokens=most, temperature=0.0)
        right = answer(token_ids, params, self.windows)
        return [(token + (len(token_ids) + place) % 7 // 6) % VOCABULARY for place, token in enumerate(right)]


def accelerator_of(world: World) -> Accelerator:
    if world.is_device and DEVICE.type == "cuda":
        return make_accelerator(DEVICE)
    return LateAccelerator(is_device=world.is_device)


def speculation_of(world: World) -> Speculation | None:
    """Return speculation with as many drafts as there is room for."""
    if not world.drafts:
        return None
    proposer = Oracle(world.windows) if world.drafter == "oracle" else OpenProposer()
    speculation = Speculation(
        lambda sequence: proposer,
        max_tokens=world.drafts,
        most_drafts=world.most_drafts,
        costs=None,
        seconds_per_pass=None if world.drafter == "oracle" else 1e-9,
    )
    use_every_draft(speculation, plain=world.plain_steps or 0)
    return speculation


class Play:
    """An execution of a script that remembers the expected answer of each request."""

    def __init__(self, world: World) -> None:
        layout = KVCacheLayout(
            block_size=BLOCK_SIZE,
            groups=tuple(
                KVCacheGroup(
                    layers=(index,) if world.drafter == "oracle" else (0, 1),
                    num_blocks=world.num_blocks,
                    window=window,
                    num_swap_blocks=world.num_swap_blocks,
                )
                for index, window in enumerate(world.windows)
            ),
        )
        draft, accelerator = draft_of(world), accelerator_of(world)
        caches = tuple(
            make_cache(world.num_blocks + 1, accelerator.device)
            for _ in range(len(world.windows) + (draft is not None))
        )
        self.runner = ModelRunner(
            RunnerParts(
                model=ReadBackModel(),
                caches=caches,
                layout=layout,
                num_heads=1,
                max_rows=world.max_rows,
                max_tokens=world.budget,
                max_model_len=MAX_MODEL_LEN,
                most_drafts=world.most_drafts,
                accelerator=accelerator,
                graph_sizes=world.graph_sizes,
            ),
            vocab_size=VOCABULARY,
            draft=draft,
        )
        self.runner.capture_graphs()
        options = SchedulerOptions(
            max_num_seqs=world.max_rows,
            max_num_batched_tokens=world.budget,
            enable_prefix_caching=world.caching,
            preemption_mode=world.preemption_mode,
        )
        traits = ModelTraits(max_model_len=MAX_MODEL_LEN)
        scheduler = Scheduler(options, traits, layout, speculation=speculation_of(world))
        self.engine = Engine(scheduler=scheduler, runner=self.runner, overlap=world.overlap)
        self.windows = world.windows
        self.expected: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}
        self.cancelled: set[int] = set()

    def add(self, number: int, prompt: list[int], params: SamplingParams, copies: int, forked: bool) -> None:
        for key in range(number * 10, number * 10 + copies):
            parent = number * 10 if forked and key > number * 10 else None
            request = Request(key=key, prompt_token_ids=prompt, params=params, seed=0, parent=parent)
            if self.engine.add(request) is None:
                self.said[key], self.expected[key] = [], answer(prompt, params, self.windows)

    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.one_step()

    def one_step(self) -> None:
        step = self.engine.step()
        self.engine.check_integrity()
        if step is not None:
            for key, token in zip(step.keys, step.token_ids, strict=True):
                self.said[key].append(token)

    def cancel(self, number: int, index: int) -> None:
        if self.expected:
            victim = sorted(self.expected)[index % len(self.expected)]
            if self.engine.cancel(victim):
                self.cancelled.add(victim)

    def forget(self, number: int) -> None:
        self.engine.forget_prefixes()

    def finish(self) -> list[int]:
        """Check all answers; return the number of steps in flight after each call of the engine."""
        depths = []
        while self.engine.has_work:
            self.one_step()
            depths.append(len(self.engine._flights))
        self.runner.close()
        for key, tokens in self.expected.items():
            if key in self.cancelled:
                assert tokens[: len(self.said[key])] == self.said[key]
            else:
                assert tokens == self.said[key]
        return depths


def make_cache(num_blocks: int, device: torch.device) -> KVCache:
    cache = allocate_kv_cache(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    cache.values.fill_(torch.nan)
    return cache


prompts = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 0, 1] * head + tail,
    st.sampled_from([0, 0, 2, 2, 4]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 9, 20, 40, 55]),
    temperature=st.just(0.0),
    ignore_eos=st.just(True),
    stop_token_ids=st.sampled_from([(), (), (3,)]),
)
additions = st.tuples(st.just("add"), prompts, params, st.sampled_from([3, 2, 1, 4]), st.booleans())
actions = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("forget")),
    ),
    min_size=4,
    max_size=14,
)
# Four blocks hold the longest sequence, and up to six sequences run at once, so most runs preempt.
worlds = st.builds(
    World,
    num_blocks=st.sampled_from([4, 4, 5, 7]),
    num_swap_blocks=st.sampled_from([30, 30, 5, 0]),
    windows=st.sampled_from([(None,), (None,), (None, 5), (None, 17, 20), (30,)]),
    max_rows=st.sampled_from([2, 3, 6, 6]),
    budget=st.integers(6, 40),
    overlap=st.sampled_from([True, True, False]),
    caching=st.booleans(),
    graph_sizes=st.builds(
        GraphSizes,
        decode=st.sampled_from([(), (1,), (2, 3), (1, 2, 4, 6), (6,)]),
        mixed=st.sampled_from([(), (3, 8, 40), (16,)]),
    ),
    preemption_mode=st.sampled_from(["swap", "swap", "recompute"]),
    drafts=st.sampled_from([0, 0, 1, 4, 15]),
    plain_steps=st.sampled_from([0, 1, 5, 9]),
    wrong=st.sampled_from([0, 5, 2]),
    is_device=st.sampled_from([True, True, False]),
).flatmap(
    lambda world: st.builds(
        replace,
        st.just(world),
        drafter=st.sampled_from(["oracle", "model"] if world.windows == (None,) else ["oracle"]),
        graph_sizes=st.sampled_from(
            [world.graph_sizes, default_sizes(world.max_rows, world.budget, verifies=world.drafts > 0)]
        ),
    )
)


@given(world=worlds, script=actions)
def test_any_schedule_answers_as_alone(world: World, script: list[Any]) -> None:
    play = Play(world)
    for number, (kind, *arguments) in enumerate(script):
        getattr(play, kind)(number, *arguments)
    play.finish()


@pytest.mark.parametrize("drafter", ["oracle", "model"])
def test_steps_without_drafts_run_ahead_between_drafts(drafter: str) -> None:
    """A draft model that knows the text stays right: it learns the tokens that were sampled meanwhile."""
    world = World(
        num_blocks=12,
        num_swap_blocks=0,
        windows=(None,),
        max_rows=2,
        budget=16,
        overlap=True,
        caching=False,
        graph_sizes=GraphSizes(),
        preemption_mode="recompute",
        drafts=3,
        plain_steps=6,
        drafter=drafter,
    )
    play = Play(world)
    for key, prompt in enumerate(([1, 2, 3], [4, 5])):
        play.add(key, prompt, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True), 1, False)
    depths = play.finish()
    counters = play.engine.counters
    # A call leaves a step in flight if the next one need not wait for it.
    assert depths.count(1) > counters.steps / 2
    assert counters.draft_tokens > 20
    assert (counters.accepted_tokens == counters.draft_tokens) == (drafter != "oracle")


@pytest.mark.parametrize("drafter", ["oracle", "model"])
@pytest.mark.parametrize(
    "sizes", [GraphSizes(), GraphSizes(decode=(2, 3), mixed=(3, 8, 40))], ids=["eager", "captured"]
)
def test_accepted_drafts_save_steps(drafter: str, sizes: GraphSizes) -> None:
    """A draft model that knows the text is always right, also in chunks of prompts; an oracle often."""
    counters = []
    for drafts in (0, 4):
        world = World(
            num_blocks=12,
            num_swap_blocks=0,
            windows=(None,),
            max_rows=3,
            budget=16,
            overlap=False,
            caching=False,
            graph_sizes=sizes,
            preemption_mode="recompute",
            drafts=drafts,
            drafter=drafter,
        )
        play = Play(world)
        for key, (prompt, length) in enumerate((([1, 2, 3], 40), ([5, 6] * 13, 23), ([4], 30))):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            play.add(key, prompt, params, 1, False)
        play.finish()
        counters.append(play.engine.counters)
    plain, drafting = counters
    assert drafting.generation_tokens == plain.generation_tokens == 93
    assert drafting.accepted_tokens > 40 and 3 * drafting.steps < 2 * plain.steps
    assert (drafting.accepted_tokens == drafting.draft_tokens) == (drafter != "oracle")
