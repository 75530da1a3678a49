"""The seed determines the requests of a benchmark, and traces are read as they were recorded."""

import itertools
import random
from pathlib import Path
from time import tzset

import pytest

from quire_cli.bench.traces import Replay, Request, TraceError, read_trace, replayed
from quire_cli.bench.workload import Alphabet, Shape, arrivals, synthetic

IDS = Alphabet(first_token_id=300, last_token_id=400, words=False)
CHAT = Alphabet(first_token_id=0, last_token_id=0, words=True)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:13.9799600,110,27
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 7]}
"""


def test_same_seed_gives_the_same_workload() -> None:
    shape = Shape(input_tokens=50, output_tokens=10, jitter=0.5, prefix_tokens=16, prefix_groups=3, turns=2)
    one, two = (synthetic(shape, IDS, count=20, rate=5.0, burstiness=0.5, seed=7) for _ in range(2))
    other = synthetic(shape, IDS, count=20, rate=5.0, burstiness=0.5, seed=8)
    assert one == two
    assert one != other


def test_lengths_stay_within_the_jitter_and_prefixes_are_shared() -> None:
    shape = Shape(input_tokens=40, output_tokens=10, jitter=0.25, prefix_tokens=16, prefix_groups=2)
    turns = [c.turns[0] for c in synthetic(shape, IDS, count=200, rate=None, burstiness=1.0, seed=1)]
    assert {len(turn.prompt_token_ids) - 16 for turn in turns} <= set(range(30, 51))
    assert {turn.max_tokens for turn in turns} <= set(range(8, 13))
    assert len({turn.prompt_token_ids[:16] for turn in turns}) == 2
    assert all(300 <= token <= 400 for turn in turns for token in turn.prompt_token_ids)


def test_chat_prompts_are_words() -> None:
    (conversation,) = synthetic(
        Shape(input_tokens=5, output_tokens=3, turns=2), CHAT, count=1, rate=None, burstiness=1.0, seed=1
    )
    assert [len(turn.text.split()) for turn in conversation.turns] == [5, 5]
    assert conversation.turns[0].prompt_token_ids == ()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_their_rate_and_show_their_burstiness(burstiness: float) -> None:
    times = arrivals(random.Random(3), 4000, 10.0, burstiness)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.2)


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
    got = replayed(rows, window, IDS, seed=1)
    assert [c.arrival_seconds for c in got] == [0.0, 0.5, 1.0, 1.5]
    assert [len(c.turns[0].prompt_token_ids) for c in got] == [31, 41, 51, 61]
    assert [c.turns[0].max_tokens for c in got] == [12, 15, 18, 20]


def test_shared_blocks_of_a_trace_are_shared_in_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = (c.turns[0].prompt_token_ids for c in replayed(read_trace(path), Replay(), IDS, seed=1))
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    assert (len(first), len(second)) == (1100, 1300)
