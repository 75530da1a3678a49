"""The limits of a key: the syntax of its line, its token buckets, and the answers to clients."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from set_clock import SetClock
from starlette.datastructures import Headers

from quire_common.errors import KeyFileError
from quire_engine.api.auth import Access
from quire_engine.config import AccessOptions
from quire_engine.errors import InvalidRequest, Overloaded, Unavailable

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


def test_only_keys_of_clients_have_limits(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("max_concurrent=2 admin-key-1")
    with pytest.raises(KeyFileError, match="only the keys of --api-key-file can have limits"):
        Access(AccessOptions(admin_key_file=tmp_path / "admin"), SetClock())


# --- one tenant ---


def refused(take: Callable[[], None]) -> int:
    with pytest.raises(Overloaded) as caught:
        take()
    assert caught.value.code == "rate_limit_exceeded" and caught.value.retry_after_seconds is not None
    return caught.value.retry_after_seconds


def test_more_sequences_than_the_limit_allows_are_an_invalid_request(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("max_concurrent=3 a:plain-key-1")
    access = Access(AccessOptions(api_key_file=tmp_path / "keys"), SetClock())
    allowance = access.check("/v1/completions", Headers({"authorization": "Bearer plain-key-1"}), None).allowance
    assert allowance is not None
    with pytest.raises(InvalidRequest, match=r"^4 sequences .* 3 concurrent"):
        allowance.charge_sequences(4, 5)


def test_limits_follow_the_file_while_requests_run(tmp_path: Path) -> None:
    clock, file = SetClock(), tmp_path / "keys"
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
    access = Access(AccessOptions(api_key_file=tmp_path / "keys"), SetClock())
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
