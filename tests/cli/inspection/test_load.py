"""Figures from readings: rates and percentiles over a few seconds, and never 0 for unknown values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_cli.inspection.load import (
    CACHE_QUERIES,
    PREEMPTIONS,
    Deployment,
    Figures,
    Fleet,
    FleetLoad,
    Loads,
    Reading,
    Replica,
    Sort,
    figures,
    growth,
    quantile,
    reading_of,
)
from quire_common.contract import engine as m
from quire_common.metrics_page import Point
from quire_operator.autoscaling.observation import Histogram

BOUNDS = (0.1, 1.0, math.inf)


def reading(time: float, *, tokens: float = 0.0, waiting: float = 0.0, late: float = 0.0, **more: float) -> Reading:
    values = {
        m.WAITING: waiting,
        m.RUNNING: 2.0,
        m.KV_USAGE: 0.25,
        m.PROMPT_TOKENS: 10 * tokens,
        m.GENERATION_TOKENS: tokens,
        m.CACHE_HITS: tokens / 2,
        CACHE_QUERIES: tokens * 2,
        PREEMPTIONS: 0.0,
    }
    return Reading(
        time=time,
        values=values | more,
        first_tokens=Histogram(bounds=BOUNDS, counts=(tokens, tokens + late, tokens + late)),
    )


def test_metrics_page_is_summed_over_labels() -> None:
    points = [
        Point(name=m.RUNNING, labels={"engine": "0"}, value=1),
        Point(name=m.RUNNING, labels={"engine": "1"}, value=2),
        Point(name=m.FIRST_TOKEN_TIME_BUCKET, labels={"le": "1.0"}, value=3),
        Point(name=m.FIRST_TOKEN_TIME_BUCKET, labels={"le": "+Inf"}, value=4),
        Point(name=m.KV_USAGE, labels={}, value=math.nan),
    ]
    found = reading_of(points, time=5.0)
    assert found is not None
    assert found.values == {m.RUNNING: 3.0}
    assert found.first_tokens == Histogram(bounds=(1.0, math.inf), counts=(3, 4))
    assert reading_of([], time=5.0) is None


def test_rates_and_percentiles_come_from_two_readings() -> None:
    told = figures([growth(reading(10.0, tokens=100), reading(12.0, tokens=140, late=0.0, waiting=3))])
    assert (told.waiting, told.running, told.kv_percent) == (3, 2, 25)
    assert (told.prompt_tokens_per_second, told.generation_tokens_per_second) == (200, 20)
    assert told.prefix_hit_percent == 25
    assert told.time_to_first_token_p50 == pytest.approx(0.05)
    assert (told.preemptions_per_second, told.missing) == (0, {})


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (None, reading(10.0, tokens=5), "rates need a second poll"),
        (reading(10.0, tokens=5), reading(10.0, tokens=5), "rates need a second poll"),
        (reading(10.0, tokens=5), reading(12.0, tokens=1), "rates need a second poll"),  # the engine restarted
        (reading(10.0, tokens=5), reading(12.0, tokens=5), "no first tokens in this period"),
    ],
)
def test_unknown_values_are_none_with_a_reason(before: Reading | None, after: Reading, missing: str) -> None:
    told = figures([growth(before, after)])
    assert told.time_to_first_token_p95 is None
    assert told.missing["timeToFirstTokenP95"] == missing
    if "second" in missing:
        assert told.generation_tokens_per_second is None and told.waiting == 0


def test_engine_without_a_metric_is_not_shown_as_idle() -> None:
    bare = [Reading(time=t, values={m.RUNNING: 1.0}, first_tokens=None) for t in (1.0, 2.0)]
    told = figures([growth(*bare)])
    assert told.waiting is None and told.missing["waiting"] == "the engine does not export it"
    assert told.missing["timeToFirstTokenP50"] == "the engine does not export it"
    assert figures([]).missing["running"] == "no replica answers"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0, 1))
def test_quantile_lies_within_bounds_and_rises_with_rank(parts: list[float], q: float) -> None:
    counts = tuple(sum(parts[: i + 1]) for i in range(len(parts)))
    bounds = (*(float(i + 1) for i in range(len(parts) - 1)), math.inf)
    histogram = Histogram(bounds=bounds, counts=counts)
    low, high = quantile(histogram, 0.0), quantile(histogram, q)
    if counts[-1] <= 0 or len(parts) == 1:
        assert high is None
    else:
        assert low is not None and high is not None
        assert 0 <= low <= high <= bounds[-2]


def fleet(*deployments: Deployment) -> Fleet:
    return Fleet(place="here", how="asked", deployments=deployments)


def deployment(name: str, *replicas: Replica) -> Deployment:
    return Deployment(namespace=None, name=name, asked=len(replicas), ready=len(replicas), replicas=replicas)


def replica(name: str, reading: Reading | None, earlier: Reading | None = None) -> Replica:
    return Replica(id=name, name=name, phase="Ready", reading=reading, earlier=earlier, silence="" if reading else "no")


def test_answering_replicas_are_summed() -> None:
    loads = Loads(seconds=10.0)

    def look(time: float, tokens: float) -> FleetLoad:
        members = (replica("a", reading(time, tokens=tokens)), replica("b", reading(time, tokens=tokens, waiting=4)))
        return loads.update(fleet(deployment("chat", *members, replica("c", None))), sort=Sort.queue)

    assert look(0.0, 0.0).seconds == 0
    (chat,) = look(2.0, 10.0).deployments
    assert (chat.answering, chat.figures.generation_tokens_per_second, chat.figures.waiting) == (2, 10.0, 4.0)
    assert [one.name for one in chat.replicas] == ["b", "a", "c"], "the longest queue first, the unknown last"
    assert chat.replicas[2].silence == "no" and chat.replicas[2].figures.waiting is None


def test_rates_are_recent_means_and_reset_at_a_restart() -> None:
    loads = Loads(seconds=4.0)

    def rate(time: float, tokens: float) -> float | None:
        load = loads.update(fleet(deployment("chat", replica("a", reading(time, tokens=tokens)))), sort=Sort.name)
        return load.deployments[0].figures.generation_tokens_per_second

    assert [rate(0, 0), rate(2, 20), rate(4, 100), rate(6, 120)] == [None, 10, 25, 25]
    assert rate(8, 5) is None
    assert rate(10, 25) == 10


def test_first_refresh_may_compare_with_an_earlier_reading() -> None:
    one = replica("a", reading(60.0, tokens=60), earlier=reading(0.0, tokens=0))
    load = Loads(seconds=10.0).update(fleet(deployment("chat", one)), sort=Sort.name)
    assert (load.seconds, load.deployments[0].figures.generation_tokens_per_second) == (60.0, 1.0)


@pytest.mark.parametrize(
    ("sort", "order"), [(Sort.name, ["a", "b", "c"]), (Sort.queue, ["b", "a", "c"]), (Sort.kv, ["a", "b", "c"])]
)
def test_deployments_are_sorted_as_requested(sort: Sort, order: list[str]) -> None:
    found = fleet(
        deployment("c", replica("c0", None)),
        deployment("b", replica("b0", reading(1.0, waiting=9))),
        deployment("a", replica("a0", reading(1.0, waiting=1))),
    )
    assert [load.name for load in Loads(seconds=1.0).update(found, sort=sort).deployments] == order


def test_every_figure_is_either_known_or_missing_with_a_reason() -> None:
    for told in (figures([]), figures([growth(None, reading(1.0))])):
        for encoded, name in zip(Figures.__struct_encode_fields__, Figures.__struct_fields__, strict=True):
            if name != "missing":
                assert (getattr(told, name) is None) == (encoded in told.missing), name
