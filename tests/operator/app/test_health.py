"""The meaning of the API server's answers, and the operator's health."""

import json
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from quire_operator.app.telemetry import Server, Telemetry, WatchHealth
from quire_operator.kube.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    QuotaExceeded,
    Refused,
    Throttled,
    Unavailable,
    error_of,
)


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "json: cannot unmarshal string", Refused),
        (401, "Unauthorized", Forbidden),
        (403, 'deployments.apps is forbidden: User "x" cannot patch resource', Forbidden),
        (403, "is forbidden: exceeded quota: gpus, requested: 1", QuotaExceeded),
        (403, "unable to create new content in namespace x because it is being terminated", NotFound),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', Refused),
        (404, "not found", NotFound),
        (409, "Operation cannot be fulfilled: the object has been modified", Conflict),
        (413, "too large", Refused),
        (422, "spec.x: Invalid value", Refused),
        (429, "too many requests", Throttled),
        (
            500,
            "failed to create typed patch object (a/b; apps/v1, Kind=Deployment): .spec.x: field not declared",
            Refused,
        ),
        (500, "etcdserver: request timed out", Unavailable),
        (503, "apiserver is shutting down", Unavailable),
        (504, "Timeout: request did not complete within the allotted timeout", Unavailable),
        (400, 'admission webhook "x" denied the request: no', Refused),
        (403, 'admission webhook "x" denied the request: no', Refused),
    ],
)
def test_each_response_maps_to_an_error_with_its_message(status: int, message: str, error: type[ClusterError]) -> None:
    found = error_of(status, json.dumps({"kind": "Status", "message": message}).encode(), {})
    assert type(found) is error and message in str(found)


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"\xff\xfe", b"[1]"])
def test_response_without_a_status_object_is_an_error(body: bytes) -> None:
    assert isinstance(error_of(502, body, {}), Unavailable)


@pytest.mark.parametrize(
    ("header", "seconds"), [({"Retry-After": "7"}, 7.0), ({}, None), ({"Retry-After": "soon"}, None)]
)
def test_retry_after_header_is_read(header: dict[str, str], seconds: float | None) -> None:
    error = error_of(429, b"", header)
    assert isinstance(error, Throttled) and error.after_seconds == seconds


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def renewal(number: int, *, fast_clock: bool = False) -> datetime:
    return NOON + timedelta(seconds=2 * number) + timedelta(minutes=10 * fast_clock)


def health_after(seconds: int, *, watch_until: int, away: range = range(0), fast_until: int = 0) -> WatchHealth:
    """Return the health after a call every two seconds; the watches show it until they are cut.

    In ``away`` calls have no answers.
    """
    watch_health = WatchHealth(started=0.0)
    for number, now in enumerate(range(0, seconds + 1, 2)):
        renewed = renewal(number, fast_clock=now < fast_until)
        if now in away:
            continue
        watch_health.note_call(renewed, float(now))
        if now <= watch_until:
            watch_health.note_watch(renewed)
    return watch_health


@pytest.mark.parametrize(
    ("watch_health", "alive"),
    [
        (WatchHealth(started=0.0), True),  # the API server was never reached, so there is nothing to see
        (health_after(58, watch_until=-1), True),  # just started
        (health_after(62, watch_until=-1), False),
        (health_after(600, watch_until=600), True),
        (health_after(130, watch_until=100), True),
        (health_after(134, watch_until=100), False),
        (health_after(600, watch_until=100, away=range(102, 601)), True),  # the API server and everything else is away
        (
            health_after(600, watch_until=100, away=range(104, 597)),
            True,
        ),  # it has just returned, and the watches follow soon
        (health_after(134, watch_until=100, fast_until=102), False),  # the Lease's times went back with a new holder
        (health_after(600, watch_until=600, fast_until=300), True),
    ],
)
def test_operator_is_healthy_while_watches_deliver_events(watch_health: WatchHealth, alive: bool) -> None:
    assert (watch_health.problem() is None) is alive


async def test_health_and_metrics_are_served() -> None:
    telemetry, problem, ready = Telemetry(), [None, "blind"], [False]
    telemetry.written("create", "Deployment")
    server = Server(
        telemetry,
        problem=lambda: problem[0],
        ready=lambda: ready[0],
        refresh=lambda: telemetry.stands(leading=ready[0], waiting=3),
    )
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def get(path: str) -> tuple[int, str]:
                async with session.get(path) as answer:
                    return answer.status, await answer.text()

            assert await get("/healthz") == (200, "ok")
            assert (await get("/readyz"))[0] == 503
            assert "quire_operator_queue_depth 0.0" in (await get("/metrics"))[1], (
                "no LLMDeployment waits for a standby"
            )
            problem.pop(0)
            ready[0] = True
            assert await get("/healthz") == (503, "blind")
            assert (await get("/readyz"))[0] == 200
            status, text = await get("/metrics")
            assert status == 200
            assert 'quire_operator_writes_total{kind="Deployment",verb="create"} 1.0' in text
            assert "quire_operator_queue_depth 3.0" in text
    finally:
        await server.stop()


async def test_missing_permissions_are_shown_by_a_ready_operator() -> None:
    telemetry = Telemetry()
    telemetry.unlisted({"NetworkPolicy"})
    server = Server(
        telemetry,
        problem=lambda: None,
        ready=lambda: True,
        refresh=lambda: None,
        shortfall=lambda: "no permission to list NetworkPolicy",
    )
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/readyz") as answer:
                assert (answer.status, "no permission to list NetworkPolicy" in await answer.text()) == (200, True)
            async with session.get("/metrics") as answer:
                assert 'quire_operator_unlisted_kinds{kind="NetworkPolicy"} 1.0' in await answer.text()
    finally:
        await server.stop()
    telemetry.unlisted(())
    assert telemetry.registry.get_sample_value("quire_operator_unlisted_kinds", {"kind": "NetworkPolicy"}) is None
