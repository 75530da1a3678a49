"""Traces are read as they were recorded."""

from pathlib import Path
from time import tzset

import pytest

from quire_cli.simulation.traces import Replay, Request, TraceError, read_trace, shaped

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:13.9799600,110,27
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 7]}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [(0.0, 4808, 10), (0.05200, 3180, 8), (10.0, 110, 27)]),
        (MOONCAKE, [(0.0, 1100, 6), (2.0, 1300, 9)]),
    ],
)
def test_traces_are_read_in_order_of_arrival(tmp_path: Path, text: str, expected: list[tuple[float, int, int]]) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    rows = read_trace(path)
    assert [(pytest.approx(r.time, abs=1e-5), r.prompt_tokens, r.output_tokens) for r in rows] == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "needs a header"),
        ("a,b\n1,2\n", "missing: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "contains no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0,x,2\n", 'line 2.*ContextTokens "x"'),
        (f'[{{"id": "{"a" * 200_000}"}}]', "neither a trace in CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0,-5,2\n", 'line 2.*ContextTokens "-5"'),
        ('{"timestamp": 1}\n', "line 1"),
        (f'{{"timestamp": 1, "input_length": {10**400}, "output_length": 1}}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n{broken\n', "line 2"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        read_trace(path)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_times_without_an_offset_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """The zone of this machine changes nothing, nor does the end of its summer time on 2024-11-03."""
    monkeypatch.setenv("TZ", zone)
    tzset()
    path = tmp_path / "trace"
    times = ("2024-11-03 05:59:59.5000000", "2024-11-03 06:00:00+00:00", "2024-11-03 06:00:00.5")
    path.write_text("\n".join([AZURE.splitlines()[0], *(f"{time},1,1" for time in times)]))
    found = [request.time for request in read_trace(path)]
    monkeypatch.undo()
    tzset()
    assert found == [0.0, 0.5, 1.0]


def test_replay_cuts_scales_and_bounds_a_trace() -> None:
    rows = [Request(float(t), 100 * t + 10, t + 1) for t in range(10)]
    window = Replay(
        speed=2.0, start_seconds=3, duration_seconds=4, scale_input=0.1, scale_output=3, max_output_tokens=20
    )
    got = shaped(rows, window)
    assert [(request.time, request.prompt_tokens, request.output_tokens) for request in got] == [
        (0.0, 31, 12),
        (0.5, 41, 15),
        (1.0, 51, 18),
        (1.5, 61, 20),
    ]
