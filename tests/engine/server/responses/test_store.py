"""The store of responses: its bound, its order and its tenants."""

from dataclasses import replace

import pytest

from quire_engine.errors import InvalidRequest, NotFound
from quire_engine.server.responses.store import ResponseStore, StoredResponse


def response(id: str, size: int = 1000, tenant: str | None = None) -> StoredResponse:
    return StoredResponse(id=id, tenant=tenant, body=b"x" * size, messages=b"[]")


def kept(store: ResponseStore) -> list[str]:
    found = []
    for id in "abcdefghi":
        try:
            found.append(store.get(id, None).id)
        except NotFound:
            continue
    return found


def test_least_recently_used_response_is_evicted_first() -> None:
    store = ResponseStore(5000)
    for id in "abc":
        store.put(response(id))
    store.get("a", None)
    store.put(response("d"))
    assert kept(store) == ["a", "c", "d"] and store.num_bytes <= 5000


def test_a_response_that_is_generated_is_evicted_after_all_others() -> None:
    store = ResponseStore(4 * response("a").num_bytes)
    cancelled: list[str] = []

    def running(id: str) -> StoredResponse:
        return replace(response(id), cancel=lambda: cancelled.append(id))

    for id in ("a", "b"):
        store.put(running(id))
    for id in ("c", "d", "e", "f"):
        store.put(response(id))
    assert kept(store) == ["a", "b", "e", "f"] and not cancelled
    for id in ("g", "h", "i"):
        store.put(running(id))
    assert kept(store) == ["b", "g", "h", "i"] and cancelled == ["a"], "nothing else is left to evict"
    store.delete("g", None)
    store.finish(response("b"))
    assert kept(store) == ["b", "h", "i"] and cancelled == ["a", "g"], "one that has finished is not cancelled"


def test_a_response_larger_than_the_store_evicts_nothing() -> None:
    store = ResponseStore(5000)
    store.put(response("a"))
    assert not store.put(response("b", size=6000))
    assert kept(store) == ["a"]


def test_a_replaced_response_counts_once() -> None:
    store = ResponseStore(5000)
    for _ in range(9):
        store.put(response("a"))
    assert store.num_bytes == response("a").num_bytes and len(store) == 1


def test_deleted_response_is_not_stored_when_it_finishes() -> None:
    store = ResponseStore(5000)
    store.put(response("a"))
    store.delete("a", None)
    store.finish(response("a"))
    assert kept(store) == [] and store.num_bytes == 0
    store.finish(response("b"), is_new=True)
    assert kept(store) == ["b"]


def test_response_deleted_while_another_thread_finishes_it_is_gone() -> None:
    store = ResponseStore(5000)
    store.put(response("a"))

    class DeletedFirst:
        """A lock that another thread, which deletes the response, gets first."""

        def __enter__(self) -> None:
            store._remove("a")

        def __exit__(self, *_: object) -> None: ...

    store._lock = DeletedFirst()  # type: ignore[assignment]
    store.finish(response("a"))
    assert len(store) == 0


def test_the_first_end_of_a_response_is_kept() -> None:
    store = ResponseStore(5000)
    store.put(replace(response("a"), cancel=lambda: None))
    cancelled = store.finish(replace(response("a"), body=b"cancelled"))
    assert store.finish(replace(response("a"), body=b"completed")) is cancelled
    assert store.get("a", None).body == b"cancelled"


def test_another_tenant_finds_nothing() -> None:
    store = ResponseStore(5000)
    store.put(response("a", tenant="alice"))
    for tenant in (None, "bob"):
        with pytest.raises(NotFound):
            store.get("a", tenant)
        with pytest.raises(InvalidRequest):
            store.conversation("a", tenant)
    assert store.conversation("a", "alice") == []
