"""The permission to use AMX tiles."""

import ctypes
from collections.abc import Iterator

import pytest

from quire_kernels.cpu_runtime import amx


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    amx.request_permission.cache_clear()
    yield
    amx.request_permission.cache_clear()


@pytest.mark.parametrize(("answer", "expected"), [(0, True), (-1, False)])
def test_amx_permission_is_read_from_the_kernel(answer: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Call:
        def __call__(self, *arguments: int) -> int:
            calls.append(arguments)
            return answer

    class Libc:
        syscall = Call()

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc())
    assert [amx.request_permission() for _ in range(2)] == [expected] * 2
    assert calls == [(158, 0x1023, 18)]  # once for the process


def test_system_without_the_call_has_no_amx_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not amx.request_permission()


@pytest.mark.parametrize(
    ("compiled", "permitted", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_tiles_need_the_target_and_the_permission(
    compiled: bool, permitted: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "multiplies_tiles", lambda: compiled)
    monkeypatch.setattr(amx, "request_permission", lambda: permitted)
    assert amx.may_use_tiles() is expected
