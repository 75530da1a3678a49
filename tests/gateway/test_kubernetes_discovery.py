"""Watching Services and EndpointSlices, against an API server that does as it is told."""

import asyncio
import json

import msgspec
import pytest
from aiohttp import web

from quire_common.contract.gateway import HoldPolicy, ModelEndpoints
from quire_gateway.endpoints import kubernetes
from quire_gateway.endpoints.kubernetes import KubeObject, KubernetesDiscovery, ObjectKey, snapshot_of
from quire_gateway.endpoints.kubernetes_access import Access

SERVICES, SLICES = "/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"


def service(name: str, model: str | None, *, version: int = 1, created: str = "2026-01-01T00:00:00Z") -> dict:
    annotations = {"quire.dev/served-name": model} if model else {}
    return {
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "resourceVersion": str(version),
            "creationTimestamp": created,
            "labels": {"quire.dev/llmdeployment": name},
            "annotations": annotations,
        },
        "spec": {"ports": [{"name": "http", "port": 8000, "protocol": "TCP"}], "clusterIP": "10.0.0.1"},
    }


def pod(ip: str, name: str, **conditions: bool) -> dict:
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


def part(name: str, service_name: str, *endpoints: dict, version: int = 1, family: str = "IPv4") -> dict:
    return {
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": service_name},
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}],
    }


class ApiServer:
    """Lists what it holds, and sends what is put into the watches' queues."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict]] = {SERVICES: [], SLICES: []}
        self.events: dict[str, asyncio.Queue] = {SERVICES: asyncio.Queue(), SLICES: asyncio.Queue()}
        self.lists: list[str] = []
        self.watches: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.failing = False
        self.page = 500

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get(SERVICES, self._serve)
        app.router.add_get(SLICES, self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def send(self, path: str, kind: str, item: dict) -> None:
        self.events[path].put_nowait({"type": kind, "object": item})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        assert request.query["labelSelector"] == "quire.dev/llmdeployment"
        if self.failing:
            return web.json_response({"kind": "Status", "code": 500}, status=500)
        return await (self._watch(request) if "watch" in request.query else self._list(request))

    async def _list(self, request: web.Request) -> web.Response:
        self.lists.append(request.path)
        start = int(request.query.get("continue", "0"))
        items = self.items[request.path]
        metadata = {"resourceVersion": "100"}
        if start + self.page < len(items):
            metadata["continue"] = str(start + self.page)
        return web.json_response({"metadata": metadata, "items": items[start : start + self.page]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append((request.path, request.query["resourceVersion"]))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            event = await self.events[request.path].get()
            if event is None:
                return response
            line = json.dumps(event).encode() + b"\n"
            # An event may come in pieces.
            await response.write(line[:20])
            await asyncio.sleep(0)
            await response.write(line[20:])


@pytest.fixture
async def api():
    server = ApiServer()
    server.url = await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def published(api, monkeypatch):
    """What the discovery publishes, as model → {id: state}."""
    monkeypatch.setattr(kubernetes, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(kubernetes, "_LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes, "_STABLE_SECONDS", 0.0)
    access = Access(url=api.url, tls=None, token="secret")
    queue: asyncio.Queue = asyncio.Queue()
    async with access.session() as session:
        task = asyncio.create_task(KubernetesDiscovery(access, session).run(queue.put_nowait))
        yield queue
        task.cancel()
        await asyncio.wait([task])


async def until(published: asyncio.Queue, expected: dict[str, set[str]]) -> None:
    """Wait for a snapshot with these ready replicas."""
    async with asyncio.timeout(60):
        while True:
            snapshot = await published.get()
            found = {
                m: {e.id for e in model.endpoints if e.ready and not e.terminating} for m, model in snapshot.items()
            }
            if found == expected:
                return


async def test_lists_then_follows_the_watch(api, published):
    api.items[SERVICES] = [service("chat", "org/chat")]
    await until(published, {"org/chat": set()})

    api.send(SLICES, "ADDED", part("chat-x", "chat", pod("10.1.0.1", "chat-0", ready=True), version=101))
    await until(published, {"org/chat": {"ns/chat-0"}})
    two = (
        pod("10.1.0.1", "chat-0", ready=False, serving=True, terminating=True),
        pod("10.1.0.2", "chat-1", ready=True),
    )
    api.send(SLICES, "MODIFIED", part("chat-x", "chat", *two, version=102))
    await until(published, {"org/chat": {"ns/chat-1"}})
    api.send(SLICES, "DELETED", part("chat-x", "chat", version=103))
    await until(published, {"org/chat": set()})
    api.send(SERVICES, "DELETED", service("chat", "org/chat", version=104))
    await until(published, {})
    assert set(api.tokens) == {"Bearer secret"}


async def test_watch_that_ends_continues_at_its_version(api, published):
    api.items[SERVICES] = [service("chat", "chat")]
    await until(published, {"chat": set()})
    api.send(SLICES, "BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "250"}})
    api.events[SLICES].put_nowait(None)

    api.send(SLICES, "ADDED", part("x", "chat", pod("10.1.0.1", "a", ready=True), version=260))
    await until(published, {"chat": {"ns/a"}})

    assert [version for path, version in api.watches if path == SLICES] == ["100", "250"]
    assert api.lists.count(SLICES) == 1


async def test_expired_version_is_listed_again(api, published):
    api.items[SERVICES] = [service("chat", "chat")]
    await until(published, {"chat": set()})

    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    api.send(SLICES, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})

    await until(published, {"chat": {"ns/a"}})
    assert api.lists.count(SLICES) == 2


async def test_known_replicas_stay_while_the_api_server_is_down(api, published):
    api.items[SERVICES] = [service("chat", "chat")]
    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    await until(published, {"chat": {"ns/a"}})

    api.failing = True
    for path in (SERVICES, SLICES):
        api.events[path].put_nowait(None)
    requests = len(api.tokens)
    while len(api.tokens) < requests + 4:
        await asyncio.sleep(0.01)
    assert published.empty()

    api.failing = False
    api.send(SLICES, "MODIFIED", part("x", "chat", pod("10.1.0.9", "b", ready=True), version=300))
    await until(published, {"chat": {"ns/b"}})


async def test_watch_continues_after_an_unexpected_error(api, monkeypatch, caplog):
    """For example an event loop that confuses two sockets; a gateway that stopped would serve no requests."""
    monkeypatch.setattr(kubernetes, "_FIRST_PAUSE_SECONDS", 0.02)
    api.items[SERVICES] = [service("chat", "chat")]
    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    access = Access(url=api.url, tls=None, token="secret")
    queue: asyncio.Queue = asyncio.Queue()
    async with access.session() as session:
        get, failures = session.get, [RuntimeError("File descriptor 15 is used by transport"), KeyError("items")]
        monkeypatch.setattr(
            session, "get", lambda *args, **more: _raise(failures.pop()) if failures else get(*args, **more)
        )
        task = asyncio.create_task(KubernetesDiscovery(access, session).run(queue.put_nowait))
        await until(queue, {"chat": {"ns/a"}})
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
    assert caplog.text.count("keeping the last known endpoints") == 2 and "File descriptor 15" in caplog.text


def _raise(error: Exception) -> None:
    raise error


async def test_silent_watch_is_given_up(api, published, monkeypatch):
    monkeypatch.setattr(kubernetes, "_WATCH_TIMEOUT", kubernetes.aiohttp.ClientTimeout(total=None, sock_read=0.05))
    while len(api.watches) < 6:
        await asyncio.sleep(0.01)
    assert {version for _, version in api.watches} == {"100"}


async def test_long_lists_come_in_pages(api, published):
    api.page = 2
    api.items[SERVICES] = [service(f"s{n}", f"m{n}") for n in range(5)]
    await until(published, {f"m{n}": set() for n in range(5)})


class Namespaces:
    """An API server that lets us see some namespaces; in each is one Service."""

    def __init__(self) -> None:
        self.hidden: set[str] = set()
        self.refusals = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info["namespace"]
        if namespace in self.hidden:
            self.refusals += 1
            return web.json_response({"kind": "Status", "message": f"no rights in {namespace}"}, status=403)
        if "watch" in request.query:
            await asyncio.Event().wait()
        items = [service(namespace, namespace)] if request.path.endswith("/services") else []
        return web.json_response({"metadata": {"resourceVersion": "100"}, "items": items})


@pytest.fixture
async def namespaces(monkeypatch):
    """The server, and what the discovery of the namespaces a and b publishes once it is started."""
    for name, seconds in {"_FIRST_PAUSE": 0.01, "_LONGEST_PAUSE": 0.02, "_NOT_ALLOWED": 0.1}.items():
        monkeypatch.setattr(kubernetes, f"{name}_SECONDS", seconds)
    server, app, tasks = Namespaces(), web.Application(), []
    app.router.add_get("/{api:.*}/namespaces/{namespace}/{kind}", server.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = Access(url=f"http://127.0.0.1:{runner.addresses[0][1]}", tls=None, token="secret")
    async with access.session() as session:

        def start() -> asyncio.Queue:
            queue: asyncio.Queue = asyncio.Queue()
            looking = KubernetesDiscovery(access, session, namespaces=("a", "b"))
            tasks.append(asyncio.create_task(looking.run(queue.put_nowait)))
            return queue

        yield server, start
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await runner.cleanup()


async def test_missing_namespace_does_not_hide_others(namespaces):
    server, start = namespaces
    server.hidden = {"b"}
    published = start()
    await until(published, {"a": set()})
    server.hidden.clear()  # and once it is there, its models are
    await until(published, {"a": set(), "b": set()})


async def test_nothing_is_published_while_all_watches_are_forbidden(namespaces):
    server, start = namespaces
    server.hidden = {"a", "b"}
    published = start()
    while server.refusals < 60:
        await asyncio.sleep(0.01)
    assert published.empty()


async def test_gateways_are_counted_by_their_own_service():
    """Nothing is published before: until then a tenant could use too much."""
    counted = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        is_own = request.query["labelSelector"] == "kubernetes.io/service-name=gateway"
        assert is_own == (request.match_info["namespace"] == "quire")
        if "watch" in request.query:
            await asyncio.Event().wait()
        if is_own:
            await counted.wait()
        slices = [part("gateway-x", "gateway", pod("10.1.0.1", "gw-0", ready=True), pod("10.1.0.2", "gw-1"))]
        return web.json_response({"metadata": {"resourceVersion": "100"}, "items": slices if is_own else []})

    app = web.Application()
    app.router.add_get("/{api:.*}/namespaces/{namespace}/{kind}", serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = Access(url=f"http://127.0.0.1:{runner.addresses[0][1]}", tls=None, token="secret")
    queue: asyncio.Queue = asyncio.Queue()
    async with access.session() as session:
        discovery = KubernetesDiscovery(access, session, namespaces=("a",), gateway_service=("quire", "gateway"))
        assert discovery.num_gateways == 1
        task = asyncio.create_task(discovery.run(queue.put_nowait))
        await asyncio.sleep(0.1)  # as long as it takes to come to nothing
        assert queue.empty()
        counted.set()
        await queue.get()
        assert discovery.num_gateways == 2
        task.cancel()
        await asyncio.wait([task])
    await runner.cleanup()


def snapshot(services: list[dict], parts: list[dict]):
    objects = [msgspec.convert(item, KubeObject) for item in services]
    keyed = {ObjectKey(item.metadata.namespace, item.metadata.name): item for item in objects}
    found = snapshot_of(keyed, [msgspec.convert(item, KubeObject) for item in parts])
    return {name: model.endpoints for name, model in found.items()}


def test_only_services_with_a_served_name_are_models():
    # The headless Service of the same pods has the label, but no such annotation.
    parts = [part("x", "chat", pod("10.1.0.1", "a")), part("y", "chat-headless", pod("10.1.0.1", "a"))]
    found = snapshot([service("chat", "chat"), service("chat-headless", None)], parts)
    assert {model: [e.url for e in endpoints] for model, endpoints in found.items()} == {
        "chat": ["http://10.1.0.1:8000"]
    }


def test_unknown_conditions_follow_the_api():
    (endpoint,) = snapshot([service("chat", "chat")], [part("x", "chat", pod("10.1.0.1", "a"))])["chat"]
    assert (endpoint.ready, endpoint.serving, endpoint.terminating) == (True, True, False)


def test_ipv6_and_slices_without_the_port_or_endpoints():
    bare = part("y", "chat")
    bare["endpoints"] = None
    portless = part("z", "chat", pod("10.1.0.7", "c"))
    portless["ports"] = None
    found = snapshot([service("chat", "chat")], [part("x", "chat", pod("fd00::1", "a"), family="IPv6"), bare, portless])
    assert [e.url for e in found["chat"]] == ["http://[fd00::1]:8000"]


OWNER = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment", "uid": "uid", "controller": True}


@pytest.mark.parametrize(
    ("created", "seniority", "owner", "serves"),
    [
        ("2025-01-01T00:00:00Z", None, OWNER, "ns/z-0"),
        ("2027-01-01T00:00:00Z", None, OWNER, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/uid", OWNER, "ns/z-0"),
        ("2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z/uid", OWNER, "ns/a-0"),
        # Whoever may write Services may write this, but then nothing sets it right.
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/uid", None, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/another", OWNER, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/", OWNER | {"uid": ""}, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/uid", OWNER | {"controller": False}, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/uid", OWNER | {"apiVersion": "quire.dev/v9"}, "ns/a-0"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z/uid", OWNER | {"kind": "Thing"}, "ns/a-0"),
    ],
)
def test_older_llmdeployment_gets_a_contested_name(created, seniority, owner, serves):
    """A recreated Service is younger than its LLMDeployment, and its annotation says so."""
    one, other = service("z", "chat", created=created), service("a", "chat")
    if seniority is not None:
        one["metadata"]["annotations"]["quire.dev/seniority"] = seniority
    if owner is not None:
        one["metadata"]["ownerReferences"] = [owner]
    parts = [part("p", "z", pod("10.1.0.1", "z-0")), part("q", "a", pod("10.1.0.2", "a-0"))]
    assert [e.id for e in snapshot([other, one], parts)["chat"]] == [serves]


async def test_served_name_conflict_is_logged_once(api, published, caplog):
    api.items[SERVICES] = [service("a", "chat"), service("z", "chat", created="2025-01-01T00:00:00Z")]
    await until(published, {"chat": set()})
    for n in range(3):
        api.send(SLICES, "ADDED", part(f"p{n}", "z", pod(f"10.1.0.{n}", f"z-{n}", ready=True), version=200 + n))
        await until(published, {"chat": {f"ns/z-{k}" for k in range(n + 1)}})
    logged = [r.message for r in caplog.records if "served name conflict" in r.message]
    assert len(logged) == 1 and "ns/a claims 'chat', which ns/z serves" in logged[0]


def test_pod_in_two_slices_is_one_replica():
    parts = [part("x", "chat", pod("10.1.0.1", "a", ready=True)), part("y", "chat", pod("10.1.0.1", "a", ready=False))]
    (endpoint,) = snapshot([service("chat", "chat")], parts)["chat"]
    assert endpoint.ready


@pytest.mark.parametrize(
    ("annotations", "policy"),
    [
        ({}, HoldPolicy()),
        (
            {"hold-timeout-seconds": "600", "max-held": "50", "start-up-seconds": "92.5"},
            HoldPolicy(timeout_seconds=600.0, max_held=50, start_up_seconds=92.5),
        ),
        ({"hold-timeout-seconds": "0", "max-held": "0"}, HoldPolicy(timeout_seconds=0.0, max_held=0)),
        ({"hold-timeout-seconds": "nan", "max-held": "1e9", "start-up-seconds": "soon"}, HoldPolicy()),
        ({"hold-timeout-seconds": "-1", "max-held": "-1", "start-up-seconds": "inf"}, HoldPolicy()),
    ],
)
def test_policy_for_held_requests_is_read_from_the_service(annotations, policy):
    item = service("chat", "chat")
    item["metadata"]["annotations"] |= {f"quire.dev/{name}": value for name, value in annotations.items()}
    found = snapshot_of({ObjectKey("ns", "chat"): msgspec.convert(item, KubeObject)}, [])
    assert found == {"chat": ModelEndpoints(name="chat", endpoints=(), hold=policy)}
