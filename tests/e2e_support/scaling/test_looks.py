"""Queries on a series of observations of replicas."""

from dataclasses import replace

import pytest

from e2e_support import objects
from e2e_support.objects import Pod
from e2e_support.scaling import looks as series_of
from e2e_support.scaling.looks import Ending, Look, Step


def pod(name: str, *, ready: bool = True, ending: bool = False) -> Pod:
    metadata = {"name": name, "namespace": "space", "uid": f"uid-{name}"}
    return replace(objects.pod({"metadata": metadata}), is_ready=ready, is_ending=ending)


def look(time: float, desired: int | None, *pods: Pod) -> Look:
    return Look(time=time, desired=desired, conditions={}, pods=pods)


def series(*desired: int | None) -> list[Look]:
    return [look(float(time), value) for time, value in enumerate(desired)]


@pytest.mark.parametrize(
    ("desired", "expected"),
    [
        ((), []),
        ((1, 1, 1), [(0, 1)]),
        ((None, 1, 1, 2, 2, 3, 1), [(1, 1), (3, 2), (5, 3), (6, 1)]),
        ((2, None, 2), [(0, 2)]),
    ],
)
def test_steps_are_changes_of_known_values(desired, expected):
    assert series_of.desired_steps(series(*desired)) == [Step(time=time, value=value) for time, value in expected]


def test_series_starts_with_the_state_before_it():
    looks = series(3, 2, 2, 3, 1)
    assert [found.desired for found in series_of.during(looks, 1.5, 3.0)] == [2, 2, 3]
    assert series_of.lowest(series_of.desired_steps(series_of.during(looks, 1.5, 3.0))) == 2
    assert series_of.lowest(series_of.desired_steps(series_of.during(looks, 0.5, 1.0))) == 2


def test_state_before_the_given_time_is_ignored():
    looks = series(1, 2, 1, 2)
    assert series_of.first_at(looks, lambda seen: seen.desired == 2, since=1.5) == 3.0
    assert series_of.first_at(looks, lambda seen: seen.desired == 3, since=0.0) is None


def test_only_pods_that_are_ready_and_stay_count_as_ready():
    seen = look(0.0, 3, pod("a"), pod("b", ready=False), pod("c", ending=True))
    assert seen.ready == 1 and [found.name for found in seen.serving] == ["a"]


def test_pod_ending_lasts_from_deletion_to_removal():
    looks = [
        look(0.0, 2, pod("a"), pod("b")),
        look(1.0, 1, pod("a"), pod("b", ending=True)),
        look(2.0, 1, pod("a"), pod("b", ending=True)),
        look(3.0, 1, pod("a")),
        look(4.0, 0, pod("a", ending=True)),
    ]
    assert series_of.endings(looks) == [
        Ending(pod="b", uid="uid-b", seen=1.0, gone=3.0),
        Ending(pod="a", uid="uid-a", seen=4.0, gone=None),
    ]
