"""The policy ``fair``: whatever one tenant queues, the others get their share of the computation."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.options import PolicyName
from quire_engine.core.policy import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request, Sequence

Make = Callable[..., Any]


class Sequences:
    """A factory of sequences, which arrive one after another."""

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self.count = 0

    def push(self, tenant: str | None, *, length: int = 10) -> Sequence:
        self.count += 1
        params = SamplingParams(max_tokens=100)
        request = Request(key=self.count, prompt_token_ids=[1] * length, params=params, seed=0, tenant=tenant)
        order = self.share.order(request, arrival=self.count)
        sequence = Sequence(request, order=order, limit=length + 100, eos_token_ids=(), num_groups=1)
        self.share.push(sequence)
        return sequence

    def admit(self) -> Sequence:
        first = self.share.first()
        sequence = self.share.pop()
        assert sequence is first
        self.share.admitted(sequence)
        return sequence


@pytest.fixture
def sequences() -> Sequences:
    return Sequences(FairShare())


def names(popped: list[Sequence]) -> str:
    return "".join(sequence.request.tenant or "-" for sequence in popped)


def test_tenants_alternate_and_keep_the_order_of_their_requests(sequences: Sequences) -> None:
    for tenant in "aaaaabb-":
        sequences.push(None if tenant == "-" else tenant)
    popped = [sequences.admit() for _ in range(8)]
    assert names(popped) == "ab-abaaa"
    assert [sequence.key for sequence in popped if sequence.request.tenant == "a"] == [1, 2, 3, 4, 5]
    assert sequences.share.first() is None and len(sequences.share) == 0


def test_a_turn_is_as_long_as_the_prompt(sequences: Sequences) -> None:
    for _ in range(6):
        sequences.push("a", length=30)
        sequences.push("b", length=10)
    assert names([sequences.admit() for _ in range(8)]) == "abbbabbb"


def test_sampled_tokens_cost_more_than_prompt_tokens(sequences: Sequences) -> None:
    for tenant in "ab":
        sequences.push(tenant)
    ran = [sequences.admit(), sequences.admit()]
    for tenant in "ababab":
        sequences.push(tenant, length=10)
    sequences.share.record_sampled(ran[:1] * 10)
    # Ten sampled tokens of a are worth two prompts of b.
    assert OUTPUT_WEIGHT == 2 * PROMPT_WEIGHT
    assert names([sequences.admit() for _ in range(4)]) == "bbab"


def test_cached_prompt_tokens_are_not_charged_to_the_tenant(sequences: Sequences) -> None:
    for tenant in "aabbbb":
        sequences.push(tenant, length=10)
    first = sequences.share.pop()
    first.num_cached = 9
    sequences.share.admitted(first)
    assert names([sequences.admit() for _ in range(3)]) == "bab"


def test_idle_tenant_gains_no_credit(sequences: Sequences) -> None:
    sequences.push("b")
    sequences.admit()
    for _ in range(50):
        sequences.push("a")
    for _ in range(20):
        sequences.admit()
    for _ in range(20):
        sequences.push("b")
    # Not twenty times b, although a had so much more.
    assert names([sequences.admit() for _ in range(6)]) == "bababa"


def test_new_tenants_do_not_starve_existing_tenants(sequences: Sequences) -> None:
    for _ in range(3):
        sequences.push("a")
    sequences.admit()
    for tenant in "bcd":
        sequences.push(tenant)
    popped = [sequences.admit()]
    sequences.push("e")
    popped += [sequences.admit() for _ in range(5)]
    assert names(popped) == "bcdaea"


def test_tenant_keeps_its_debt_after_its_queue_empties(sequences: Sequences) -> None:
    for tenant in "aabbbbbb":
        sequences.push(tenant, length=10)
    ran = sequences.admit()
    last = next(sequence for sequence in sequences.share.sequences() if sequence.request.tenant == "a")
    last.finished = True
    sequences.share.discard(last)
    sequences.share.record_sampled([ran] * 15)
    sequences.push("a")
    assert names([sequences.admit() for _ in range(6)]) == "bbbbab"


def test_running_sequences_of_most_served_tenant_are_last(sequences: Sequences) -> None:
    for tenant in "aab":
        sequences.push(tenant)
    a1, b, a2 = (sequences.admit() for _ in range(3))
    running = [a1, a2, b]
    sequences.share.arrange(running)
    assert running == [b, a1, a2]
    sequences.share.record_sampled([b] * 20)
    sequences.share.arrange(running)
    assert running == [a1, a2, b]


def test_tenants_are_dropped_once_their_counter_is_not_ahead(sequences: Sequences) -> None:
    for number in range(5000):
        sequences.push(f"t{number}", length=1 + number % 7)
        sequences.admit()
    assert len(sequences.share._tenants) < 300
    for number in range(5000):
        waiting = sequences.push(f"u{number}")
        waiting.finished = True
        sequences.share.discard(waiting)
    assert len(sequences.share._tenants) < 300 and len(sequences.share._heap) < 300


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "admit", "drop", "draw"]), st.integers(0, 7)), max_size=150))
def test_the_smallest_counter_goes_first_and_counts_add_up(script: list[tuple[str, int]]) -> None:
    share = FairShare()
    sequences = Sequences(share)
    waiting: list[Sequence] = []
    ran: list[Sequence] = []
    for kind, number in script:
        if kind == "push":
            waiting.append(sequences.push("abc"[number % 3], length=1 + number))
        elif kind == "admit" and waiting:
            first = share.first()
            assert first is not None
            counters = {sequence.request.tenant: share._counter(sequence) for sequence in waiting}
            assert counters[first.request.tenant] == min(counters.values())
            of_tenant = [sequence.key for sequence in waiting if sequence.request.tenant == first.request.tenant]
            assert first.key == min(of_tenant)
            ran.append(sequences.admit())
            waiting.remove(ran[-1])
        elif kind == "drop" and waiting:
            gone = waiting.pop(number % len(waiting))
            gone.finished = True
            share.discard(gone)
        elif kind == "draw" and ran:
            share.record_sampled(ran[-1 - number :])
        assert len(share) == len(waiting)
        assert share.num_tokens == sum(sequence.num_tokens for sequence in waiting)
        assert {id(sequence) for sequence in share.sequences()} == set(map(id, waiting))


PROMPT, ANSWER = 40, 8


def tokens_until_first(here: Any, key: int) -> int:
    """Return the tokens that the engine computes until the sequence has one."""
    before = here.engine.counters.scheduled_tokens
    while key not in here.tokens:
        here.step()
    return int(here.engine.counters.scheduled_tokens - before)


def flooded(make_world: Make, policy: PolicyName, queued: int, **shape: Any) -> Any:
    here = make_world(policy=policy, budget=16, num_blocks=400, max_model_len=600, caching=False, **shape)
    for key in range(queued):
        assert here.add(key, [key % 40 + 1] * PROMPT, max_tokens=ANSWER, tenant="a") is None
    for _ in range(25):
        here.step()
    return here


@pytest.mark.parametrize("overlap", [False, True])
def test_queued_prompts_cost_another_tenant_one_service(make_world: Make, overlap: bool) -> None:
    waits = {}
    cases: list[tuple[str, PolicyName, int]] = [("alone", "fair", 0), ("fair", "fair", 500), ("fcfs", "fcfs", 500)]
    for name, policy, queued in cases:
        here = flooded(make_world, policy, queued, overlap=overlap) if queued else make_world(policy="fair", budget=16)
        assert here.add(1000, list(range(1, PROMPT + 1)), max_tokens=ANSWER, tenant="b") is None
        waits[name] = tokens_until_first(here, 1000)
    assert waits["alone"] == PROMPT
    # The rest of a prompt, the answers of the others in the meantime, and the step that was already scheduled.
    assert waits["fair"] - waits["alone"] <= PROMPT + ANSWER + (16 if overlap else 0)
    assert waits["fcfs"] > 100 * waits["fair"]


def test_tenant_is_admitted_if_another_holds_every_row(make_world: Make) -> None:
    steps = {}
    for policy in ("fair", "fcfs"):
        here = make_world(policy=policy, num_blocks=800, max_num_seqs=8, budget=64, max_model_len=600)
        for key in range(20):
            assert here.add(key, [key + 1] * 5, max_tokens=300, tenant="a") is None
        for _ in range(50):
            here.step()
        assert here.add(1000, [7] * 5, max_tokens=ANSWER, tenant="b") is None
        before = here.engine.counters.steps
        tokens_until_first(here, 1000)
        steps[policy] = here.engine.counters.steps - before
    # A row becomes free after a few more tokens of a, not at the end of one of its long answers.
    assert steps["fair"] <= 8 and steps["fcfs"] > 200


def test_tenant_is_admitted_if_another_holds_every_block(make_world: Make) -> None:
    here = make_world(policy="fair", num_blocks=64, max_num_seqs=8, budget=64, max_model_len=150, caching=False)
    for key in range(8):
        assert here.add(key, [key + 1] * 20, max_tokens=100, tenant="a") is None
    while not here.engine.counters.preemptions:
        here.step()
    assert here.add(1000, [7] * 60, max_tokens=ANSWER, tenant="b") is None
    before = here.engine.counters.steps
    tokens_until_first(here, 1000)
    assert here.engine.counters.steps - before < 40
    here.run()


def test_tenant_with_most_service_is_preempted_first(make_world: Make) -> None:
    """It is not taken from the sequence that came last."""
    here = make_world(policy="fair", num_blocks=24, max_num_seqs=4, budget=64, max_model_len=90)
    for key in range(3):
        assert here.add(key, [key + 1] * 8, max_tokens=60, tenant="a") is None
    for _ in range(10):
        here.step()
    assert here.add(9, [9] * 8, max_tokens=30, tenant="b") is None
    here.run()
    assert here.sequences[9].num_preemptions == 0
    assert sum(here.sequences[key].num_preemptions for key in range(3)) > 0


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=4),
    more=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=4),
    rows=st.integers(1, 5),
    overlap=st.booleans(),
)
def test_tenants_with_a_backlog_get_equal_service(
    make_world: Make, lengths: list[tuple[int, int]], more: list[tuple[int, int]], rows: int, overlap: bool
) -> None:
    """The paper bounds their difference by the work that runs at once and one prompt (theorem 4.4)."""
    here = make_world(policy="fair", num_blocks=300, max_num_seqs=rows, budget=16, overlap=overlap, caching=False)
    tenant_of: dict[int, str] = {}
    waiting: dict[str, int] = {"a": 0, "b": 0}
    served: dict[str, int] = defaultdict(int)
    weight = PROMPT_WEIGHT * 30 + OUTPUT_WEIGHT * rows * 12
    for number in range(30):
        for tenant, shapes in (("a", lengths), ("b", more)):
            key = 2 * number + (tenant == "b")
            prompt, answer = shapes[number % len(shapes)]
            assert here.add(key, [number + 1] * prompt, max_tokens=answer, tenant=tenant) is None
            tenant_of[key] = tenant
            waiting[tenant] += 1
    prompts = {sequence.key: sequence.num_prompt for sequence in here.scheduler._waiting.sequences()}
    while here.engine.has_work and all(waiting.values()):
        step = here.step()
        if step is None:
            continue
        for key in step.first_scheduled_keys:
            served[tenant_of[key]] += PROMPT_WEIGHT * prompts[key]
            waiting[tenant_of[key]] -= 1
        for key in step.keys:
            served[tenant_of[key]] += OUTPUT_WEIGHT
        assert abs(served["a"] - served["b"]) <= 2 * weight
