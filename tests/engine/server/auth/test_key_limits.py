"""The limits of a key: the syntax of its line, its token buckets, and the answers to clients."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from quire_common.errors import KeyFileError
from quire_common.key_file import UNLIMITED, KeyLimits, parse_keys
from quire_common.rate_limits import Bucket, charged, missing, refilled, written_duration
from quire_engine.config import AccessOptions
from quire_engine.errors import InvalidRequest, Overloaded, Unavailable
from quire_engine.server.auth.access import Access
from quire_engine.server.auth.allowance import Allowance

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- the syntax of a line ---

DIGEST = hashlib.sha256(b"plain-key-1").hexdigest()


@pytest.mark.parametrize(
    ("line", "name", "limits"),
    [
        ("plain-key-1", None, UNLIMITED),
        ("team-a:plain-key-1", "team-a", UNLIMITED),
        (f"team-a:sha256:{DIGEST}", "team-a", UNLIMITED),
        ("name=team-a plain-key-1", "team-a", UNLIMITED),
        (f"max_concurrent=3 sha256:{DIGEST}", None, KeyLimits(max_concurrent=3)),
        ("requests_per_minute=6 team-a:plain-key-1", "team-a", KeyLimits(requests_per_minute=6)),
        (
            f"name=team-a requests_per_minute=600   tokens_per_minute=200000\tmax_concurrent=32 sha256:{DIGEST}",
            "team-a",
            KeyLimits(requests_per_minute=600, tokens_per_minute=200000, max_concurrent=32),
        ),
    ],
)
def test_a_line_names_a_key_and_its_limits(line: str, name: str | None, limits: KeyLimits) -> None:
    (key,) = parse_keys(line, "keys")
    assert (key.name, key.digest.hex(), key.limits) == (name, DIGEST, limits)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("name=team-a requests_per_minute=600", "line 1: the key is missing"),
        ("name=team-a", "the key is missing"),
        ("requests_per_minute=0 plain-key-1", "requests_per_minute must be a whole number of at least 1"),
        ("requests_per_minute=many plain-key-1", "requests_per_minute must be a whole number"),
        ("requests_per_hour=5 plain-key-1", "line 1: expected KEY"),
        ("tenant=plain-key-1", "line 1: expected KEY"),
        ("name=a name=b plain-key-1", "name is set twice"),
        ("name=a b:plain-key-1", "the name is set twice"),
        ("name=ä plain-key-1", "a name of 1 to 64 letters"),
        (
            "a:plain-key-1\n\nmax_concurrent=2 a:other-key-1",
            "lines 1 and 3: keys of one name",
        ),
    ],
)
def test_a_wrong_line_is_explained_without_showing_the_key(content: str, part: str) -> None:
    with pytest.raises(KeyFileError, match=part) as caught:
        parse_keys(content, "keys")
    assert "plain-key" not in str(caught.value)


def test_only_keys_of_clients_have_limits(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("max_concurrent=2 admin-key-1")
    with pytest.raises(KeyFileError, match="only the keys of --api-key-file can have limits"):
        Access(AccessOptions(admin_key_file=tmp_path / "admin"), Clock())


# --- buckets ---


@pytest.mark.parametrize(
    ("level", "passed", "per_minute", "expected"),
    [
        (0.0, 1.0, 60, 1.0),
        (0.0, 60.0, 60, 60.0),
        (0.0, 600.0, 60, 60.0),  # at most the amount of a minute
        (-30.0, 15.0, 60, -15.0),  # a debt is paid first
        (50.0, 0.0, 20, 20.0),  # the limit was reduced
        (5.0, -9.0, 60, 5.0),
    ],
)
def test_a_bucket_fills_evenly_up_to_a_minutes_worth(
    level: float, passed: float, per_minute: int, expected: float
) -> None:
    assert refilled(Bucket(level, 100.0), per_minute, 100.0 + passed).level == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "cost", "lack"), [(10.0, 4, 0.0), (10.0, 12, 2.0), (-5.0, 1, 6.0), (60.0, 500, 0.0), (59.0, 500, 1.0)]
)
def test_a_cost_above_the_capacity_needs_a_full_bucket(level: float, cost: float, lack: float) -> None:
    assert missing(Bucket(level, 0.0), cost, 60) == lack


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60), st.integers(1, 120))
def test_token_bucket_never_exceeds_its_refill_rate(events: list[tuple[float, int]], per_minute: int) -> None:
    bucket, now, used = Bucket(float(per_minute), 0.0), 0.0, 0
    for passed, cost in events:
        now += passed
        bucket = refilled(bucket, per_minute, now)
        if missing(bucket, cost, per_minute) == 0.0:
            bucket = charged(bucket, cost)
            used += cost
        assert used <= per_minute * (1 + now / 60) + 40 + 1e-6  # one cost beyond it: the debt


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.25, "250ms"), (7.5, "7.5s"), (12.0, "12s"), (90.0, "1m30s"), (120, "2m0s")]
)
def test_reset_times_have_the_openai_format(seconds: float, text: str) -> None:
    assert written_duration(seconds) == text


# --- one tenant ---


def refused(take: Callable[[], None]) -> int:
    with pytest.raises(Overloaded) as caught:
        take()
    assert caught.value.code == "rate_limit_exceeded" and caught.value.retry_after_seconds is not None
    return caught.value.retry_after_seconds


def test_requests_are_limited_with_retry_after() -> None:
    clock = Clock()
    allowance = Allowance("a", KeyLimits(requests_per_minute=6), clock)
    for _ in range(6):
        allowance.charge_request()
    assert refused(allowance.charge_request) == 10
    clock.now = 9.9
    assert refused(allowance.charge_request) == 1
    clock.now = 10.0
    allowance.charge_request()


def test_sampled_tokens_leave_a_debt_for_later_requests() -> None:
    clock = Clock()
    allowance = Allowance("a", KeyLimits(tokens_per_minute=60), clock)
    allowance.charge_sequences(1, 50)
    allowance.charge_tokens(40)
    assert refused(lambda: allowance.charge_sequences(1, 10)) == 40  # 30 of debt and 10 requested, at one per second
    clock.now = 40.0
    allowance.charge_sequences(1, 10)


def test_concurrent_sequences_are_released() -> None:
    allowance = Allowance("a", KeyLimits(max_concurrent=3), Clock())
    allowance.charge_sequences(2, 5)
    refused(lambda: allowance.charge_sequences(2, 5))
    allowance.release(1)
    allowance.charge_sequences(2, 5)
    with pytest.raises(InvalidRequest, match=r"^4 sequences .* 3 concurrent"):
        allowance.charge_sequences(4, 5)


def test_a_refused_request_costs_nothing() -> None:
    allowance = Allowance("a", KeyLimits(tokens_per_minute=60, max_concurrent=1), Clock())
    allowance.charge_sequences(1, 30)
    refused(lambda: allowance.charge_sequences(1, 30))
    allowance.release(1)
    refused(lambda: allowance.charge_sequences(1, 31))
    allowance.charge_sequences(1, 30)
    allowance.refund(1, 30)
    assert (allowance.running, allowance.headers()["x-ratelimit-remaining-tokens"]) == (0, "30")


def test_limits_follow_the_file_while_requests_run(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys"
    file.write_text("max_concurrent=2 a:plain-key-1")
    access = Access(AccessOptions(api_key_file=file), clock)
    headers = Headers({"authorization": "Bearer plain-key-1"})
    running = access.check("/v1/completions", headers, None).allowance
    assert running is not None
    running.charge_sequences(2, 10)
    file.write_text("max_concurrent=3 requests_per_minute=1 a:plain-key-1")
    clock.now = 2.0
    now = access.check("/v1/completions", headers, None).allowance
    assert now is running and (now.limits.max_concurrent, now.running) == (3, 2)
    now.charge_sequences(1, 10)
    now.charge_request()
    refused(now.charge_request)
    file.write_text("a:plain-key-1")
    clock.now = 4.0
    access.check("/v1/completions", headers, None)
    running.charge_sequences(9, 10)
    running.charge_request()
    running.release(12)


def test_keys_of_one_name_share_one_allowance(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("max_concurrent=2 a:plain-key-1\nmax_concurrent=2 a:other-key-1\n")
    access = Access(AccessOptions(api_key_file=tmp_path / "keys"), Clock())
    first, second = (
        access.check("/v1/models", Headers({"authorization": f"Bearer {key}"}), None)
        for key in ("plain-key-1", "other-key-1")
    )
    assert first.allowance is second.allowance and first.tenant == second.tenant == "a"


# --- over HTTP ---


def with_keys(serving: Serving, tmp_path: Path, line: str, says: str | None = None) -> Any:
    (tmp_path / "keys").write_text(f"{line} plain-key-1\n")
    return serving(says, access=AccessOptions(api_key_file=tmp_path / "keys"))


async def test_request_beyond_the_limit_is_429_in_openai_format(serving: Serving, tmp_path: Path) -> None:
    async with with_keys(serving, tmp_path, "name=ann requests_per_minute=2 tokens_per_minute=1000", "ok") as server:
        server.http.headers["authorization"] = "Bearer plain-key-1"
        answer = await server.complete(max_tokens=2, n=2)
        assert answer.status_code == 200 and server.engine.streams[0].routing["tenant"] == "ann"
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        used = answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
        assert (await server.complete()).status_code == 200
        refused = await server.complete()
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 requests per minute" in error["message"]
        assert server.context.metrics.rejected == {"key_limit": 1}
        assert (await server.http.get("/v1/models")).status_code == 200  # listing models costs nothing


async def test_concurrency_is_released_however_a_request_ends(
    serving: Serving, tmp_path: Path, token_ids: TokenIds
) -> None:
    async with with_keys(serving, tmp_path, "max_concurrent=2") as server:
        server.http.headers["authorization"] = "Bearer plain-key-1"
        for end in ("finishes", "breaks", "leaves"):
            asking = asyncio.create_task(server.complete(n=2))
            number = len(server.engine.streams)
            first, second = await server.engine.stream(number), await server.engine.stream(number + 1)
            refused = await server.complete()
            assert refused.status_code == 429 and "2 concurrent sequences" in refused.json()["error"]["message"]
            assert (await server.complete(n=3)).status_code == 400
            if end == "finishes":
                first.draw(token_ids("a"), "length")
                second.draw(token_ids("b"), "length")
            elif end == "breaks":
                first.breaks(Unavailable("the engine stopped"))
            else:
                asking.cancel()
                await asyncio.wait_for(second.cancelled.wait(), 60)
            await asyncio.wait({asking})
        while server.context.lifecycle.in_flight:  # the last client has only just left
            await asyncio.sleep(0.01)
        server.engine.refuses = Unavailable("the engine is being restarted")
        assert (await server.complete(n=2)).status_code == 503
        server.engine.refuses = None
        server.engine.says = "ok"
        assert (await server.complete(n=2)).status_code == 200
