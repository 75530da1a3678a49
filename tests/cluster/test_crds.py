"""The conditions for which a definition counts as served."""

import pytest

from quire_cluster.crds import is_established


def conditions(**status: str) -> dict[str, object]:
    return {"status": {"conditions": [{"type": kind, "status": value} for kind, value in status.items()]}}


@pytest.mark.parametrize(
    ("definition", "established"),
    [
        ({}, False),
        ({"status": {}}, False),
        ({"status": {"conditions": None}}, False),
        (conditions(NamesAccepted="True"), False),
        (conditions(NamesAccepted="True", Established="False"), False),
        (conditions(NamesAccepted="True", Established="True"), True),
    ],
)
def test_crd_is_served_once_established(definition: dict[str, object], established: bool) -> None:
    assert is_established(definition) is established
