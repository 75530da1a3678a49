"""Durations and quantities as Kubernetes writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.quantities import format_bytes, format_duration, parse_bytes, parse_duration_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300s", 300),
        ("2m", 120),
        ("1h30m", 5400),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("0", 0),
        ("0s", 0),
        ("1h1m1s1ms", 3661.001),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5 s", "s", "-1s", "1d", "1m 30s", "1.s", "٣s", "1e3s"])
def test_invalid_durations_are_none(text: str) -> None:
    assert parse_duration_seconds(text) is None


@given(st.integers(0, 10**9))
def test_duration_round_trips(milliseconds: int) -> None:
    assert parse_duration_seconds(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 * 2**30),
        ("1k", 1000),
        ("1.5Mi", 3 * 2**19),
        ("1e3", 1000),
        ("12", 12),
        (12, 12),
        ("100m", 1),
        (".5Ki", 512),
    ],
)
def test_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "4GB", "4 Gi", "-1", "1e999", "1_000", "0x10", -1, 10**40])
def test_invalid_quantities_are_none(text: str | int) -> None:
    assert parse_quantity(text) is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB"), (80 * 10**9, "74.5 GiB")]
)
def test_byte_sizes_are_formatted(count: int, text: str) -> None:
    assert format_bytes(count) == text
