"""Pod templates merge as in kubectl's patches."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.api.fields import Problem
from quire_operator.deployment.pod_template import merge

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "env", "containers", "args", "$patch"]), JSON, max_size=4)


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    problems: list[Problem] = []
    result = merge(base, patch, path="spec", problems=problems)
    assert not problems, problems
    return result


@pytest.mark.parametrize(
    ("base", "patch", "wanted"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ),
        (
            {"env": [{"name": "A"}, {"name": "B"}]},
            {"env": [{"name": "A", "$patch": "delete"}]},
            {"env": [{"name": "B"}]},
        ),
        ({"a": {"x": 1, "y": 2}}, {"a": {"$patch": "replace", "z": 3}}, {"a": {"z": 3}}),
        (
            {"volumeMounts": [{"mountPath": "/a", "name": "x"}]},
            {"volumeMounts": [{"mountPath": "/a", "readOnly": True}]},
            {"volumeMounts": [{"mountPath": "/a", "name": "x", "readOnly": True}]},
        ),
        (
            {},
            {"containers": [{"name": "s", "env": [{"name": "A"}]}]},
            {"containers": [{"name": "s", "env": [{"name": "A"}]}]},
        ),
    ],
)
def test_merging(base: dict[str, Any], patch: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert merged(base, patch) == wanted


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"env": [{"value": "1"}]}, "spec.env[0].name"),
        ({"containers": ["engine"]}, "spec.containers[0]"),
        ({"$retainKeys": ["a"]}, "spec.$retainKeys"),
        ({"a": {"$patch": "merge"}}, "spec.a.$patch"),
    ],
)
def test_unmergeable_value_is_a_problem_with_its_path(patch: dict[str, Any], path: str) -> None:
    problems: list[Problem] = []
    merge({}, patch, path="spec", problems=problems)
    assert [problem.path for problem in problems] == [path]


@given(OBJECTS, OBJECTS)
def test_merge_never_raises_and_changes_no_input(base: Any, patch: Any) -> None:
    before = repr((base, patch))
    merge(base, patch, path="spec", problems=[])
    assert repr((base, patch)) == before


@given(OBJECTS)
def test_empty_patch_changes_nothing(base: Any) -> None:
    assert merged(base, {}) == base
