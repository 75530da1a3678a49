"""Two tracks behind one model name: exact shares, sessions, fallback, and what is counted for each track."""

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.gateway import (
    CANARY,
    STABLE,
    CanaryRoute,
    Endpoint,
    ModelEndpoints,
    bin_of,
    bin_start,
)
from quire_common.served_names import NameScope
from quire_gateway.canary import Tracks
from quire_gateway.endpoints.file import parse_endpoints
from quire_gateway.endpoints.kubernetes_objects import KubeSlice, read_model, snapshot_of
from quire_gateway.fleet import Fleet, Pool
from quire_gateway.prompt import peek_request

ROUTE = CanaryRoute(revision="r2", weight_percent=5)


def shares(tracks: Tracks, sessions: list[str | None]) -> Counter[str]:
    return Counter(tracks.choose(session) for session in sessions)


@pytest.mark.parametrize("weight", [1, 5, 10, 33, 50, 90])
def test_weight_is_exact_without_sessions(weight: int) -> None:
    tracks = Tracks(CanaryRoute(revision="r", weight_percent=weight))
    assert shares(tracks, [None] * 10_000)[CANARY] == weight * 100


@pytest.mark.parametrize("weight", [1, 5, 33, 50, 90])
def test_sessions_among_other_requests_keep_the_weight(weight: int) -> None:
    """Requests without a session make up for sessions with many requests."""
    tracks = Tracks(CanaryRoute(revision="r", weight_percent=weight))
    sessions = [f"user-{number % 40}" if number % 3 == 0 else None for number in range(10_000)]
    assert abs(shares(tracks, sessions)[CANARY] - weight * 100) <= 50, "half a percentage point"


@given(st.text(max_size=50), st.lists(st.integers(0, 90), min_size=2, max_size=6))
def test_session_stays_on_the_canary_while_the_weight_rises(session: str, weights: list[int]) -> None:
    tracks = Tracks(CanaryRoute(revision="r", weight_percent=0))
    seen = []
    for weight in sorted(weights):
        tracks.update(CanaryRoute(revision="r", weight_percent=weight))
        assert tracks.choose(session) == tracks.choose(session)
        seen.append(tracks.choose(session))
    assert seen == sorted(seen, reverse=True)  # "stable" sorts after "canary"


@given(st.integers(0, 90), st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=200))
def test_canary_with_zero_weight_gets_no_requests(before: int, sessions: list[str | None]) -> None:
    tracks = Tracks(CanaryRoute(revision="r", weight_percent=before))
    shares(tracks, sessions)
    tracks.update(CanaryRoute(revision="r", weight_percent=0))
    assert CANARY not in shares(tracks, sessions)


@given(st.floats(1e-6, 1e3))
def test_bins_contain_their_latencies(seconds: float) -> None:
    number = bin_of(seconds)
    assert number == 0 or bin_start(number) <= seconds * 1.000001
    assert number == 320 or seconds < bin_start(number + 1) * 1.000001


@pytest.mark.parametrize(
    ("weight", "stable", "canary", "is_equal"),
    [(50, 1, 1, True), (33, 4, 2, True), (20, 4, 1, True), (8, 12, 1, True), (10, 4, 1, False), (50, 4, 2, False),
     (50, 1, 0, False), (50, 0, 1, False), (0, 1, 1, False)],
)  # fmt: skip
def test_loads_of_replicas_are_equal(weight: int, stable: int, canary: int, is_equal: bool) -> None:
    tracks = Tracks(CanaryRoute(revision="r", weight_percent=weight))
    assert tracks.is_equal_load(stable=stable, canary=canary) is is_equal


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"prompt_cache_key": "a", "user": "b"}, '"a"'),
        ({"user": "b"}, '"b"'),
        ({"user": ""}, None),
        ({"user": 7}, None),
        ({}, None),
    ],
)
def test_session_is_read_from_the_body(body: dict[str, object], session: str | None) -> None:
    peeked = peek_request(json.dumps({"model": "chat", "prompt": "x", **body}).encode(), is_generating=True)
    assert peeked.session == session


def pool(*endpoints: Endpoint, route: CanaryRoute | None = ROUTE) -> Pool:
    fleet = Fleet()
    fleet.publish({"chat": ModelEndpoints(name="chat", endpoints=endpoints, canary=route)}, now=0)
    return fleet.pools["chat"]


def endpoint(name: str, track: str, *, ready: bool = True) -> Endpoint:
    return Endpoint(id=name, url=f"http://127.0.0.1/{name}", ready=ready, track=track)


def picked(found: Any) -> str:
    return str(found.endpoint.id)


def test_other_track_is_the_fallback() -> None:
    one, two = endpoint("s", STABLE), endpoint("c", CANARY)
    both = pool(one, two)
    assert picked(both.pick(prompt_tokens=1.0, track=CANARY)) == "c"
    assert picked(both.pick(prompt_tokens=1.0, track=STABLE)) == "s"
    assert picked(both.pick(prompt_tokens=1.0, track=CANARY, exclude={"c"})) == "s"
    starting = pool(one, endpoint("c", CANARY, ready=False))
    assert picked(starting.pick(prompt_tokens=1.0, track=CANARY)) == "s"
    assert picked(pool(two).pick(prompt_tokens=1.0, track=STABLE)) == "c"


def test_new_revision_starts_with_new_figures() -> None:
    found = pool(endpoint("s", STABLE))
    assert found.tracks is not None
    found.tracks.figures[STABLE].requests = 7
    found.route(CanaryRoute(revision="r2", weight_percent=50))
    assert found.tracks.figures[STABLE].requests == 7
    found.route(CanaryRoute(revision="r3", weight_percent=5))
    assert found.tracks.figures[STABLE].requests == 0
    found.route(None)
    assert found.tracks is None


def test_endpoints_file_can_name_a_canary() -> None:
    endpoints = [
        {"id": "s", "url": "http://127.0.0.1:1"},
        {"id": "c", "url": "http://127.0.0.1:2", "track": "canary"},
    ]
    canary = {"revision": "r2", "weight_percent": 20}
    body = {"models": [{"name": "chat", "endpoints": endpoints, "canary": canary}]}
    (model,) = parse_endpoints(json.dumps(body).encode()).values()
    assert [each.track for each in model.endpoints] == [STABLE, CANARY]
    assert model.canary == CanaryRoute(revision="r2", weight_percent=20)


def kube_slice(service: str, pod: str) -> KubeSlice:
    body = {
        "metadata": {"name": service, "namespace": "a", "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"name": pod}}],
    }
    return msgspec.convert(body, KubeSlice)


def kube_model(name: str, **rollout: object) -> Any:
    status = {"servedName": {"name": name, "since": "2026-01-01T00:00:00Z"}, "rollout": rollout}
    return read_model(json.dumps({"metadata": {"name": name, "namespace": "a"}, "status": status}).encode())


def test_cluster_canary_is_the_service_with_its_suffix() -> None:
    slices = [kube_slice("chat", "s"), kube_slice("chat-canary", "c")]
    model = kube_model("chat", canaryRevision="r2", weightPercent=10, comparedPerMillion=5_000)
    found = snapshot_of([model], slices, NameScope.CLUSTER)["chat"]
    assert [(each.id, each.track) for each in found.endpoints] == [("a/c", CANARY), ("a/s", STABLE)]
    assert found.canary == CanaryRoute(revision="r2", weight_percent=10, compared_percent=0.5)
    without = snapshot_of([kube_model("chat")], slices, NameScope.CLUSTER)["chat"]
    assert [each.id for each in without.endpoints] == ["a/s"] and without.canary is None


def test_deployment_named_like_a_canary_keeps_its_replicas() -> None:
    slices = [kube_slice("chat", "s"), kube_slice("chat-canary", "own")]
    models = [kube_model("chat", canaryRevision="r2", weightPercent=10), kube_model("chat-canary")]
    found = snapshot_of(models, slices, NameScope.CLUSTER)
    assert [each.id for each in found["chat"].endpoints] == ["a/s"]
    assert [each.id for each in found["chat-canary"].endpoints] == ["a/own"]


# --- with a running gateway ---


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(6):
        await response.write(f"data: {number}\n\n".encode())
        await asyncio.sleep(0.002)
    await response.write(b"data: [DONE]\n\n")
    return response


async def fail(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken", "code": "x"}}, status=500)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def unavailable(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "gone", "code": "engine_restarting"}}, status=503)


@pytest.fixture
async def both(gateway: Any, replicas: Any) -> Any:
    """Return a gateway with a stable replica and a canary, each request to the canary by its session."""
    stable, canary = await replicas("s"), await replicas("c")
    gateway.discovery.canary = CanaryRoute(revision="r2", weight_percent=50)
    await gateway.push(chat=[stable.endpoint(), canary.endpoint(track=CANARY)])
    return gateway, stable, canary


async def send(gateway: Any, count: int, **body: object) -> list[tuple[int, str | None, str]]:
    answers = []
    for _ in range(count):
        async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", **body}) as response:
            answers.append((response.status, response.headers.get("X-Quire-Track"), await response.text()))
    return answers


async def tracks_page(gateway: Any) -> dict[str, Any]:
    return (await gateway.page("/tracks"))["models"]


async def test_answers_name_their_track_and_are_counted(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_gateway.fleet.WARM_UP_SECONDS", 0.0)
    gateway, stable, canary = both
    stable.behaviour = canary.behaviour = stream
    answers = await send(gateway, 20, stream=True)
    assert Counter(track for _, track, _ in answers) == {STABLE: 10, CANARY: 10}
    page = await tracks_page(gateway)
    assert page["chat"]["revision"] == "r2"
    for track in (STABLE, CANARY):
        found = page["chat"]["tracks"][track]
        assert (found["requests"], found["errors"], found["unanswered"]) == (10, 0, 0)
        for metric in ("timeToFirstToken", "interTokenLatency"):
            assert sum(found["latencies"][metric].values()) == 10
    assert await gateway.metric("quire_gateway_track_requests_total", track=CANARY, result="ok") == 10
    assert await gateway.metric("quire_gateway_track_first_byte_seconds_count", track=CANARY) == 10
    assert await gateway.metric("quire_gateway_canary_weight", model="chat") == 0.5


async def test_cold_replicas_are_counted_and_not_compared(both: Any) -> None:
    gateway, _, _ = both
    await send(gateway, 4)
    tracks = (await tracks_page(gateway))["chat"]["tracks"]
    assert [tracks[name]["requests"] for name in (STABLE, CANARY)] == [2, 2]
    assert [tracks[name]["latencies"] for name in (STABLE, CANARY)] == [{}, {}]


async def test_replicas_with_unequal_load_are_counted_and_not_compared(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_gateway.fleet.WARM_UP_SECONDS", 0.0)
    gateway, stable, canary = both
    gateway.discovery.canary = CanaryRoute(revision="r3", weight_percent=25)
    await gateway.push(chat=[stable.endpoint(), canary.endpoint(track=CANARY)])
    await send(gateway, 4)
    tracks = (await tracks_page(gateway))["chat"]["tracks"]
    assert [tracks[name]["requests"] for name in (STABLE, CANARY)] == [3, 1]
    assert [tracks[name]["latencies"] for name in (STABLE, CANARY)] == [{}, {}]


async def test_requests_of_a_hung_canary_count_as_unanswered(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both while they wait, and when their clients have left."""
    monkeypatch.setattr("quire_gateway.fleet.WARM_UP_SECONDS", 0.0)
    gateway, _, canary = both
    canary.behaviour = hang
    waiting = [asyncio.create_task(send(gateway, 1, stream=True)) for _ in range(6)]

    async def unanswered() -> int:
        found: int = (await tracks_page(gateway))["chat"]["tracks"][CANARY]["unanswered"]
        return found

    async with asyncio.timeout(60):
        while sum(each.done() for each in waiting) < 3:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("quire_gateway.canary.PATIENCE_SECONDS", 0.05)
        while await unanswered() < 3 * 3:
            await asyncio.sleep(0.01)
    tracks = (await tracks_page(gateway))["chat"]["tracks"]
    assert tracks[STABLE] == {"requests": 3, "errors": 0, "unanswered": 0, "latencies": tracks[STABLE]["latencies"]}
    assert tracks[CANARY]["requests"] == 0
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(5):
        while (await tracks_page(gateway))["chat"]["tracks"][CANARY]["unanswered"] != 3:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("behaviour", "status"), [(fail, 500), (unavailable, 200)])
async def test_canary_errors_are_counted_separately(both: Any, behaviour: Any, status: int) -> None:
    """A request that another replica answered after the canary failed is an error of the canary nevertheless."""
    gateway, _, canary = both
    canary.behaviour = behaviour
    answers = await send(gateway, 1, prompt_cache_key=session_of(CANARY))
    assert [answer[0] for answer in answers] == [status]
    tracks = (await tracks_page(gateway))["chat"]["tracks"]
    assert (tracks[CANARY]["requests"], tracks[CANARY]["errors"]) == (1, 1)
    assert tracks[STABLE]["errors"] == 0 and tracks[STABLE]["requests"] == (status == 200)


async def test_broken_stream_is_an_error_of_its_track(both: Any) -> None:
    gateway, _, canary = both
    canary.break_after(b"data: 1\n\n")
    await send(gateway, 1, stream=True, prompt_cache_key=session_of(CANARY))
    assert (await tracks_page(gateway))["chat"]["tracks"][CANARY]["errors"] == 1


async def test_sessions_stay_on_their_track(both: Any) -> None:
    gateway, _, _ = both
    for track in (STABLE, CANARY):
        answers = await send(gateway, 5, prompt_cache_key=session_of(track))
        assert {found for _, found, _ in answers} == {track}


async def test_no_track_is_reported_without_a_canary(gateway: Any, replicas: Any) -> None:
    replica = await replicas("s")
    await gateway.push(chat=[replica.endpoint()])
    ((status, track, _),) = await send(gateway, 1)
    assert (status, track) == (200, None)
    assert await tracks_page(gateway) == {}


def session_of(track: str) -> str:
    """Return a session that is on a track at a weight of 50 %."""
    tracks = Tracks(CanaryRoute(revision="r2", weight_percent=50))
    return next(name for name in map(str, range(100)) if tracks.choose(f'"{name}"') == track)
