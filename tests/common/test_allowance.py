"""One tenant's requests, tokens and concurrent sequences."""

from collections.abc import Callable

import pytest
from set_clock import SetClock

from quire_common.key_file import Key, KeyLimits
from quire_common.rate_limits import Allowance, Allowances


class LimitedError(Exception):
    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OversizedError(Exception):
    def __init__(self, sequences: int, share: int, *, limit: int, num_servers: int) -> None:
        super().__init__(f"{sequences} of {share}, limit {limit}, servers {num_servers}")


def allowed(*, clock: SetClock | None = None, **limits: int) -> Allowance:
    tenants = Allowances(clock or SetClock(), limited=LimitedError, oversized=OversizedError)
    found = tenants.of(Key(name="a", digest=b"", limits=KeyLimits(**limits)))
    assert found is not None
    return found


def refused(charge: Callable[[], None]) -> int:
    with pytest.raises(LimitedError) as caught:
        charge()
    return caught.value.retry_after_seconds


def test_requests_are_limited_with_retry_after() -> None:
    clock = SetClock()
    allowance = allowed(requests_per_minute=6, clock=clock)
    for _ in range(6):
        allowance.charge_request()
    assert refused(allowance.charge_request) == 10
    clock.now = 9.9
    assert refused(allowance.charge_request) == 1
    clock.now = 10.0
    allowance.charge_request()


def test_sampled_tokens_leave_a_debt_for_later_requests() -> None:
    clock = SetClock()
    allowance = allowed(tokens_per_minute=60, clock=clock)
    allowance.charge_sequences(1, 50)
    allowance.charge_tokens(40)
    assert refused(lambda: allowance.charge_sequences(1, 10)) == 40  # 30 of debt and 10 requested, at one per second
    clock.now = 40.0
    allowance.charge_sequences(1, 10)


def test_concurrent_sequences_are_released() -> None:
    allowance = allowed(max_concurrent=3)
    allowance.charge_sequences(2, 5)
    refused(lambda: allowance.charge_sequences(2, 5))
    allowance.release(1)
    allowance.charge_sequences(2, 5)
    with pytest.raises(OversizedError, match="^4 of 3, limit 3, servers 1$"):
        allowance.charge_sequences(4, 5)


def test_a_refused_request_costs_nothing() -> None:
    allowance = allowed(tokens_per_minute=60, max_concurrent=1)
    allowance.charge_sequences(1, 30)
    refused(lambda: allowance.charge_sequences(1, 30))
    allowance.release(1)
    refused(lambda: allowance.charge_sequences(1, 31))
    allowance.charge_sequences(1, 30)
    allowance.refund(1, 30)
    assert (allowance.running, allowance.headers()["x-ratelimit-remaining-tokens"]) == (0, "30")
