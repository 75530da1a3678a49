"""The learned costs of the engine, and the demand that they predict."""

import random
from dataclasses import replace

import pytest

from quire_operator.autoscaling.demand import Reason, Tuning
from quire_operator.autoscaling.rates import Evidence, Rates, Work
from quire_operator.autoscaling.variance import Variance

STEP, PREFILL, DECODE = 0.02, 0.0005, 0.0008


def work(*, steps: float, prefill: float, generated: float, noise: float = 0.0) -> Work:
    busy = (STEP * steps + PREFILL * prefill + DECODE * generated) * (1 + noise)
    return Work(steps=steps, prefill_tokens=prefill, decode_tokens=generated, busy_seconds=busy)


def learnt(rows: list[Work]) -> Rates:
    evidence = Evidence()
    for row in rows:
        evidence = evidence.with_work(row)
    rates = evidence.with_requests(requests=20, prompt_tokens=2000, output_tokens=800).rates(kv_tokens=10_000)
    assert rates is not None
    return rates


def test_costs_are_found_from_mixed_work_despite_noise():
    draw = random.Random(1)
    rows = [
        work(
            steps=(steps := draw.uniform(50, 400)),
            prefill=draw.uniform(0, 20_000),
            generated=steps * draw.uniform(1, 16),
            noise=draw.uniform(-0.05, 0.05),
        )
        for _ in range(60)
    ]
    rates = learnt(rows)
    assert rates.step_seconds == pytest.approx(STEP, rel=0.15)
    assert rates.prefill_seconds_per_token == pytest.approx(PREFILL, rel=0.15)
    assert rates.decode_seconds_per_token == pytest.approx(DECODE, rel=0.3)
    assert (rates.mean_prompt_tokens, rates.mean_output_tokens) == (100, 40)


def test_single_sequences_do_not_raise_the_cost_of_a_full_batch():
    rates = learnt([work(steps=100, prefill=1000, generated=100) for _ in range(10)])
    # The cost of a single sequence is the step's cost; a full batch shares it.
    assert rates.seconds_per_output_token(10) < 0.2 * STEP


@pytest.mark.parametrize(("busiest", "error"), [(4, 0.2), (32, 0.05)])
def test_several_tokens_per_sequence_keep_the_batch_speed(busiest, error):
    """Up to 4 sequences have 4 drafts each, of which 2 are accepted; more have none, and a full batch has 32.

    A replica that never had more than 4 sequences is estimated too slow, because of the passes of the draft model.
    """
    rng = random.Random(3)
    rows = []
    for _ in range(60):
        running, steps = rng.randrange(1, busiest + 1), rng.uniform(200, 400)
        drafts, passes = (4, 0.004) if running <= 4 else (0, 0.0)
        decoded, prefill = steps * running * (1 + drafts), rng.uniform(0, 20 * steps)
        busy = steps * (0.010 + passes) + 0.0004 * decoded + 2e-5 * prefill
        rows.append(Work(steps=steps, prefill_tokens=prefill, decode_tokens=decoded, busy_seconds=busy))
    assert learnt(rows).seconds_per_output_token(32) == pytest.approx(0.010 / 32 + 0.0004, rel=error)


def test_costs_are_never_negative():
    rows = [
        Work(steps=100, prefill_tokens=p, decode_tokens=g, busy_seconds=b)
        for p, g, b in ((0, 900, 1.0), (9000, 100, 0.5), (100, 100, 3.0))
    ]
    rates = learnt(rows)
    assert min(rates.step_seconds, rates.prefill_seconds_per_token, rates.decode_seconds_per_token) >= 0


def test_newer_evidence_outweighs_older():
    slow = [work(steps=100, prefill=0, generated=400) for _ in range(200)]
    fast = [Work(steps=100, prefill_tokens=0, decode_tokens=400, busy_seconds=row.busy_seconds / 4) for row in slow]
    before = learnt(slow).seconds_per_output_token(4)
    after = learnt(slow + fast * 6).seconds_per_output_token(4)
    assert after == pytest.approx(before / 4, rel=0.15)


@pytest.mark.parametrize(("rows", "requests"), [(0, 20), (1, 20), (30, 4)])
def test_rates_are_unknown_with_little_evidence(rows, requests):
    evidence = Evidence()
    for _ in range(rows):
        evidence = evidence.with_work(work(steps=30, prefill=10, generated=30))
    evidence = evidence.with_requests(requests=requests, prompt_tokens=1, output_tokens=1)
    assert evidence.rates(kv_tokens=1) is None


def test_idle_time_does_not_change_rates():
    evidence = Evidence().with_work(work(steps=100, prefill=10, generated=100))
    assert evidence.with_work(Work(steps=0, prefill_tokens=0, decode_tokens=0, busy_seconds=0)) == evidence


# --- arriving work ---


class Engine:
    """The counters of one replica that processes requests of 200 prompt and 50 output tokens without a queue."""

    def __init__(self) -> None:
        requests = ("arrived_requests", "finished_requests", "steps", "busy_seconds")
        tokens = ("arrived_prompt_tokens", "prompt_tokens", "generation_tokens")
        self.counters = dict.fromkeys((*requests, *tokens), 0.0)

    def serve(self, requests: float, *, batch: float = 4.0) -> dict[str, float]:
        prompt, generated = requests * 200, requests * 50
        steps = generated / batch
        for name, grown in {
            "arrived_requests": requests,
            "arrived_prompt_tokens": prompt,
            "prompt_tokens": prompt,
            "generation_tokens": generated,
            "finished_requests": requests,
            "steps": steps,
            "busy_seconds": STEP * steps + PREFILL * prompt + DECODE * generated,
        }.items():
            self.counters[name] += grown
        return dict(self.counters)


def test_arrivals_beyond_a_replica_scale_up_before_a_queue(kit):
    story, engine = kit.story(current=1, max_sequences=4), Engine()
    for requests in [3, 4, 5, 3, 4, 5] * 9:
        story.tick(kit.ready("a", running=1, **engine.serve(requests)))
    assert story.target == 1

    # A busy replica takes 0.1 s of prefill and 50 × (0.02 / 4 + 0.0008) s of decoding a request: 2.56 a second.
    for _ in range(4):
        decision = story.tick(kit.ready("a", running=1, **engine.serve(60)))
    busy = 4.0 / 2.56
    assert decision.desired >= 2 and story.decisions[-1].inputs["waiting"] == 0
    risen = next(d for d in story.decisions if d.is_change)
    assert risen.reason is Reason.WORK
    assert "requests/s of 50 output tokens" in risen.message and "headroom (p95; deviation" in risen.message
    assert story.decisions[-1].inputs["needArrivingWork"] > busy / 0.8
    # Half an hour later the rise has no effect on the variance.
    for _ in range(120):
        decision = story.tick(kit.ready("a", running=1, **engine.serve(60)))
    assert decision.inputs["needArrivingWork"] < 2 * busy


def spare_after(*works: float, percentile: int = 95) -> float:
    """Return the headroom after the work of these ticks has repeated for an hour."""
    variance = Variance()
    for work in works * (240 // len(works)):
        variance = variance.seen(work, seconds=15.0)
    mean = sum(works) / len(works)
    return Tuning().spare_replicas(variance.deviation(mean), 0.0, percentile=percentile)


def test_spare_replicas_grow_with_the_percentile():
    assert spare_after(4.0, percentile=99) > spare_after(4.0) > spare_after(4.0, percentile=50)
    assert spare_after(4.0) == pytest.approx(2 * spare_after(1.0))
    assert spare_after(400.0) == pytest.approx(20 * spare_after(1.0))
    assert spare_after(0.0, percentile=99) == 0.0


def test_bursty_work_keeps_more_spare_than_even_work():
    even, uneven, bursts = spare_after(4.0), spare_after(3.0, 5.0), spare_after(0.0, 0.0, 0.0, 16.0)
    assert even < uneven < bursts
    assert 4.0 + bursts > 0.9 * 16.0, "a queue of a moment bears the rest"


def test_bursts_decay_under_even_load():
    variance = Variance()
    for _ in range(10):
        variance = variance.seen(0.0, seconds=45.0).seen(16.0, seconds=15.0)
    deviations = []
    for _ in range(240):
        variance = variance.seen(4.0, seconds=15.0)
        deviations.append(variance.deviation(4.0))
    assert all(b <= a for a, b in zip(deviations[1:], deviations[2:], strict=False))
    assert deviations[-1] < 0.4 * deviations[0]


def test_single_outlier_decays_quickly(kit):
    story, engine = kit.story(current=1, max_sequences=4), Engine()
    for requests in (*[4] * 20, 10**9, *[4] * 200):
        idle = (kit.ready(f"idle{n}") for n in range(story.target - 1))
        decision = story.tick(kit.ready("a", running=1, **engine.serve(requests)), *idle)
    assert (decision.desired, max(d.desired for d in story.decisions)) == (1, 10)


def test_shorter_poll_intervals_do_not_raise_the_variance():
    """For independent requests, the variance of their rate is inversely proportional to the observed time."""
    rng, long, short = random.Random(1), Variance(), Variance()
    for _ in range(2000):
        parts = [sum(rng.random() < 0.3 for _ in range(10)) for _ in range(3)]
        for part in parts:
            short = short.seen(part / 5, seconds=5.0)
        long = long.seen(sum(parts) / 15, seconds=15.0)
    assert short.deviation(0.5) == pytest.approx(long.deviation(0.5), rel=0.25)


def test_spare_share_applies_with_many_replicas(kit):
    """It applies from where the deviation grows more slowly than the unplanned share of a replica."""
    story, engine = kit.story(current=1, max_sequences=4, max_replicas=400), Engine()
    for _ in range(12):
        story.tick(kit.ready("a", running=1, **engine.serve(60)))
    for _ in range(150):
        decision = story.tick(kit.ready("a", running=1, **engine.serve(60_000)))
    assert decision.inputs["needArrivingWork"] == pytest.approx(4000 / 2.56 / 0.8, rel=0.1)
    assert "over 0.8" in next(term.detail for term in decision.terms if term.reason is Reason.WORK)


def test_arrivals_during_an_outage_are_not_a_burst(kit):
    story, engine = kit.story(current=1, max_sequences=4), Engine()
    for _ in range(20):
        story.tick(kit.ready("a", running=1, **engine.serve(4)))
    for _ in range(20):
        story.tick(kit.ready("a", age=None))
        engine.serve(4)
    after = [story.tick(kit.ready("a", running=1, **engine.serve(4))) for _ in range(6)]
    assert [decision.desired for decision in after] == [1] * 6


def test_learned_rates_are_stored_rarely_and_survive_restarts(kit):
    story, engine = kit.story(current=1, max_sequences=4), Engine()
    records = set()
    for _ in range(40):
        story.tick(kit.ready("a", running=1, **engine.serve(20)))
        records.add(story.history.record.rates)
    assert len(records - {None}) <= 2

    story.restart()
    story.tick(kit.ready("a", running=1, **engine.serve(0)))
    decision = story.tick(kit.ready("a", running=1, **engine.serve(60)))
    assert decision.reason is Reason.WORK


# --- late first tokens ---


def test_late_first_tokens_add_one_replica_once_all_are_up(kit):
    story = kit.story(current=2)
    quick, late = 100.0, 0.0

    def tick(names: str = "ab", *, loading: str = "", lates: float = 0.0):
        nonlocal quick, late
        quick, late = quick + 10, late + lates
        up = [kit.ready(n, running=1, first_token_waits=kit.waits(quick=quick, late=late)) for n in names]
        return story.tick(*up, *(kit.loading(n) for n in loading))

    for _ in range(4):
        assert tick().desired == 2
    assert tick(lates=0.4).desired == 2, "one late first token in thirty is within the 95th percentile"
    raised = tick(lates=4)
    assert (raised.desired, raised.reason) == (3, Reason.FIRST_TOKEN)
    assert "waited over 1 s beyond their own prefill (target p95)" in raised.message
    # One at a time: while it loads, and until its effect is visible.
    for _ in range(10):
        assert tick(loading="c", lates=4).desired == 3
    assert tick("abc", lates=4).desired == 3
    assert tick("abc", lates=4).desired == 3
    assert tick("abc", lates=4).desired == 4


def test_late_first_tokens_prevent_scaling_down(kit):
    story = kit.story(current=2, max_replicas=2)
    late = 0.0
    for _ in range(40):
        late += 2
        decision = story.tick(*(kit.ready(n, first_token_waits=kit.waits(quick=5.0, late=late)) for n in "ab"))
    assert (decision.desired, decision.reason) == (2, Reason.AT_MAX)


def test_uniform_requests_keep_learned_rates():
    """It shows the cost of a request, but not its division among the three costs, so the earlier division stays."""
    evidence, rates = Evidence().with_requests(requests=20, prompt_tokens=2000, output_tokens=800), None
    draw = random.Random(3)
    mixed = [
        work(steps=(n := draw.uniform(50, 400)), prefill=draw.uniform(0, 20_000), generated=n * draw.uniform(1, 16))
        for _ in range(40)
    ]
    steady = [work(steps=300, prefill=4000, generated=2400, noise=draw.uniform(-0.02, 0.02)) for _ in range(1500)]
    for row in (*mixed, *steady):
        evidence = evidence.with_work(row)
        rates = evidence.rates(kv_tokens=10_000, before=rates)
    assert rates is not None
    assert rates.costs == pytest.approx((STEP, PREFILL, DECODE), rel=0.15)


def test_stored_rates_are_replaced_by_contrary_evidence():
    evidence = Evidence().with_requests(requests=20, prompt_tokens=2000, output_tokens=800)
    rates = Rates(
        step_seconds=0.5,
        prefill_seconds_per_token=1e-6,
        decode_seconds_per_token=0.1,
        mean_prompt_tokens=1.0,
        mean_output_tokens=1.0,
        kv_tokens=10_000,
    )
    draw = random.Random(4)
    for _ in range(60):
        steps = draw.uniform(50, 400)
        row = work(steps=steps, prefill=draw.uniform(0, 20_000), generated=steps * draw.uniform(1, 16))
        evidence = evidence.with_work(row)
        rates = evidence.rates(kv_tokens=10_000, before=rates) or rates
    assert rates.costs == pytest.approx((STEP, PREFILL, DECODE), rel=0.1)


@pytest.mark.parametrize(
    ("change", "is_near"),
    [
        ({}, True),
        ({"step_seconds": 0.021}, True),
        ({"step_seconds": 0.03}, False),
        ({"prefill_seconds_per_token": 1e-9}, True),
        ({"prefill_seconds_per_token": 1e-3}, False),
        ({"mean_output_tokens": 200.0}, False),
        ({"kv_tokens": 20_000.0}, False),
    ],
)
def test_rates_with_the_same_effect_count_as_equal(change, is_near):
    rates = Rates(
        step_seconds=0.02,
        prefill_seconds_per_token=1e-8,
        decode_seconds_per_token=1e-3,
        mean_prompt_tokens=500.0,
        mean_output_tokens=100.0,
        kv_tokens=10_000.0,
    )
    other = replace(rates, **change)
    assert (rates.is_near(other, tolerance=0.1), other.is_near(rates, tolerance=0.1)) == (is_near, is_near)
