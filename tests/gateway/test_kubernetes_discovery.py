"""Watches of LLMDeployments and EndpointSlices, against a programmed API server."""

import asyncio
import json

import msgspec
import pytest
from aiohttp import web

from quire_common.contract.gateway import HoldPolicy, ModelEndpoints
from quire_common.served_names import NameScope
from quire_gateway.endpoints import kubernetes
from quire_gateway.endpoints.kubernetes import Access, KubernetesDiscovery
from quire_gateway.endpoints.kubernetes_objects import KubeSlice, read_adapter, read_model, snapshot_of

MODELS, SLICES = "/apis/quire.dev/v1alpha1/llmdeployments", "/apis/discovery.k8s.io/v1/endpointslices"
ADAPTERS = "/apis/quire.dev/v1alpha1/llmadapters"
PATHS = (MODELS, SLICES, ADAPTERS)


def llmdeployment(
    name: str,
    served: str | None = None,
    *,
    namespace: str = "ns",
    version: int = 1,
    since: str | None = "2026-01-01T00:00:00Z",
    **metadata: str,
) -> dict:
    """Return an LLMDeployment whose claim the operator has recorded, unless ``since`` is None."""
    status = {} if since is None else {"servedName": {"name": served or name, "since": since}}
    return {
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)} | metadata,
        "spec": {"model": {"source": "file:///m", "servedName": served or name}},
        "status": status,
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
    """A server that lists its items and sends the contents of the watches' queues."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict]] = {path: [] for path in PATHS}
        self.events: dict[str, asyncio.Queue] = {path: asyncio.Queue() for path in PATHS}
        self.lists: list[str] = []
        self.watches: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.failing = False
        self.missing: set[str] = set()
        self.page = 500

    async def start(self) -> str:
        app = web.Application()
        for path in PATHS:
            app.router.add_get(path, self._serve)
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
        assert request.query["labelSelector"] == ("quire.dev/llmdeployment" if request.path == SLICES else "")
        if request.path in self.missing:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
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
            # Send the event in two pieces.
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
    """Yield the published snapshots as model → {id: state}."""
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
                name: {e.id for e in model.endpoints if e.ready and not e.terminating}
                for name, model in snapshot.items()
            }
            if found == expected:
                return


async def test_lists_then_follows_the_watch(api, published):
    api.items[MODELS] = [llmdeployment("chat", "org/chat")]
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
    api.send(MODELS, "DELETED", llmdeployment("chat", "org/chat", version=104))
    await until(published, {})
    assert set(api.tokens) == {"Bearer secret"}


async def test_watch_that_ends_continues_at_its_version(api, published):
    api.items[MODELS] = [llmdeployment("chat")]
    await until(published, {"chat": set()})
    api.send(SLICES, "BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "250"}})
    api.events[SLICES].put_nowait(None)

    api.send(SLICES, "ADDED", part("x", "chat", pod("10.1.0.1", "a", ready=True), version=260))
    await until(published, {"chat": {"ns/a"}})

    assert [version for path, version in api.watches if path == SLICES] == ["100", "250"]
    assert api.lists.count(SLICES) == 1


async def test_expired_version_is_listed_again(api, published):
    api.items[MODELS] = [llmdeployment("chat")]
    await until(published, {"chat": set()})

    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    api.send(SLICES, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})

    await until(published, {"chat": {"ns/a"}})
    assert api.lists.count(SLICES) == 2


async def test_known_replicas_stay_while_the_api_server_is_down(api, published):
    api.items[MODELS] = [llmdeployment("chat")]
    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    await until(published, {"chat": {"ns/a"}})

    api.failing = True
    for path in (MODELS, SLICES):
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
    api.items[MODELS] = [llmdeployment("chat")]
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


async def test_silent_watch_is_restarted(api, published, monkeypatch):
    monkeypatch.setattr(kubernetes, "_WATCH_TIMEOUT", kubernetes.aiohttp.ClientTimeout(total=None, sock_read=0.05))
    while len(api.watches) < 6:
        await asyncio.sleep(0.01)
    assert {version for _, version in api.watches} == {"100"}


async def test_long_lists_are_read_in_pages(api, published):
    api.page = 2
    api.items[MODELS] = [llmdeployment(f"s{n}", f"m{n}") for n in range(5)]
    await until(published, {f"m{n}": set() for n in range(5)})


class Namespaces:
    """An API server that shows some namespaces, with one LLMDeployment each."""

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
        is_model = request.path.endswith("/llmdeployments")
        items = [llmdeployment(namespace, namespace=namespace)] if is_model else []
        return web.json_response({"metadata": {"resourceVersion": "100"}, "items": items})


@pytest.fixture
async def namespaces(monkeypatch):
    """Yield the server and the snapshots of the discovery of namespaces a and b."""
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
    server.hidden.clear()  # once it is there, its models are too
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
        await asyncio.sleep(0.1)  # long enough to see no effect
        assert queue.empty()
        counted.set()
        await queue.get()
        assert discovery.num_gateways == 2
        task.cancel()
        await asyncio.wait([task])
    await runner.cleanup()


def snapshot(models: list[dict], parts: list[dict], scope: NameScope = NameScope.CLUSTER):
    found = models_of(models, parts, scope)
    return {name: model.endpoints for name, model in found.items()}


def models_of(models: list[dict], parts: list[dict], scope: NameScope = NameScope.CLUSTER):
    known = [read_model(json.dumps(item).encode()) for item in models]
    slices = [msgspec.convert(item, KubeSlice) for item in parts]
    return snapshot_of([model for model in known if model is not None], slices, scope)


def test_replicas_are_in_slices_of_the_service_of_the_model():
    other = part("z", "chat", pod("10.1.0.9", "z"))
    other["metadata"]["namespace"] = "elsewhere"
    parts = [part("x", "chat", pod("10.1.0.1", "a")), part("y", "chat-headless", pod("10.1.0.1", "a")), other]
    found = snapshot([llmdeployment("chat", "org/chat")], parts)
    assert {model: [e.url for e in endpoints] for model, endpoints in found.items()} == {
        "org/chat": ["http://10.1.0.1:8000"]
    }


def test_unknown_conditions_follow_the_api():
    (endpoint,) = snapshot([llmdeployment("chat")], [part("x", "chat", pod("10.1.0.1", "a"))])["chat"]
    assert (endpoint.ready, endpoint.serving, endpoint.terminating) == (True, True, False)


def test_ipv6_and_slices_without_the_port_or_endpoints():
    bare = part("y", "chat")
    bare["endpoints"] = None
    portless = part("z", "chat", pod("10.1.0.7", "c"))
    portless["ports"] = None
    found = snapshot([llmdeployment("chat")], [part("x", "chat", pod("fd00::1", "a"), family="IPv6"), bare, portless])
    assert [e.url for e in found["chat"]] == ["http://[fd00::1]:8000"]


@pytest.mark.parametrize(
    ("z", "serves"),
    [
        ({"since": "2025-12-31T23:59:59Z"}, "ns/z-0"),
        ({"since": "2026-01-01T00:00:01Z"}, "ns/a-0"),
        # A finalizer must not keep a name.
        ({"since": "2025-12-31T23:59:59Z", "deletionTimestamp": "2026-02-01T00:00:00Z"}, "ns/a-0"),
        # Its age does not count, only the time of the claim.
        ({"since": "2026-01-01T00:00:01Z", "creationTimestamp": "2024-01-01T00:00:00Z"}, "ns/a-0"),
        # The operator has not reported it: only its spec, which tenants edit, has the name.
        ({"since": None, "creationTimestamp": "2024-01-01T00:00:00Z"}, "ns/a-0"),
    ],
)
def test_oldest_recorded_claim_gets_a_contested_name(z, serves):
    models = [llmdeployment("a", "chat"), llmdeployment("z", "chat", **z)]
    parts = [part("p", "z", pod("10.1.0.1", "z-0")), part("q", "a", pod("10.1.0.2", "a-0"))]
    assert [e.id for e in snapshot(models, parts)["chat"]] == [serves]


def test_status_of_version_0_1_claims_the_name_of_the_spec():
    """During an upgrade, gateways may be newer than the operator."""
    old = llmdeployment("chat", "org/chat", since=None, creationTimestamp="2026-01-01T00:00:00Z")
    old["status"] = {"observedGeneration": 3}
    assert list(snapshot([old], [])) == ["org/chat"]


def test_namespaced_names_cannot_collide_across_namespaces():
    models = [
        llmdeployment("chat", namespace="team-a"),
        llmdeployment("evil", "chat", namespace="team-b", since="2020-01-01T00:00:00Z"),
        llmdeployment("worse", "team-a/chat", namespace="team-b", since="2020-01-01T00:00:00Z"),
    ]
    parts = [part("p", "chat", pod("10.1.0.1", "chat-0")), part("q", "evil", pod("10.1.0.2", "evil-0"))]
    parts[0]["metadata"]["namespace"], parts[1]["metadata"]["namespace"] = "team-a", "team-b"
    found = snapshot(models, parts, NameScope.NAMESPACED)
    assert {model: [e.id for e in endpoints] for model, endpoints in found.items()} == {
        "team-a/chat": ["team-a/chat-0"],
        "team-b/chat": ["team-b/evil-0"],
        "team-b/team-a/chat": [],
    }


async def test_changes_of_other_fields_publish_nothing(api, published):
    """Operators write a status every few seconds; only changed names and replicas cause a new snapshot."""
    api.items[MODELS] = [llmdeployment("chat")]
    await until(published, {"chat": set()})
    noisy = llmdeployment("chat", version=101)
    noisy["status"]["replicas"] = 7
    api.send(MODELS, "MODIFIED", noisy)
    api.send(MODELS, "MODIFIED", llmdeployment("chat", "renamed", version=102))
    assert list(await published.get()) == ["renamed"]


async def test_unreadable_llmdeployment_does_not_hide_others(api, published):
    api.items[MODELS] = [llmdeployment("chat"), llmdeployment("bad") | {"status": {"servedName": {"name": 7}}}]
    await until(published, {"chat": set()})
    api.send(MODELS, "ADDED", llmdeployment("bad", version=101) | {"spec": {"model": 7}})
    api.send(MODELS, "ADDED", llmdeployment("good", version=102))
    await until(published, {"chat": set(), "good": set()})


async def test_cluster_without_the_kind_has_no_models(api, published, monkeypatch):
    monkeypatch.setattr(kubernetes, "_NOT_ALLOWED_SECONDS", 0.1)
    api.missing = {MODELS}
    await until(published, {})
    api.missing, api.items[MODELS] = set(), [llmdeployment("chat")]
    await until(published, {"chat": set()})


async def test_served_name_conflict_is_logged_once(api, published, caplog):
    api.items[MODELS] = [llmdeployment("a", "chat"), llmdeployment("z", "chat", since="2025-01-01T00:00:00Z")]
    await until(published, {"chat": set()})
    for n in range(3):
        api.send(SLICES, "ADDED", part(f"p{n}", "z", pod(f"10.1.0.{n}", f"z-{n}", ready=True), version=200 + n))
        await until(published, {"chat": {f"ns/z-{k}" for k in range(n + 1)}})
    logged = [r.message for r in caplog.records if "served name conflict" in r.message]
    assert len(logged) == 1 and "ns/a claims 'chat', which ns/z serves" in logged[0]


def test_pod_in_two_slices_is_one_replica():
    parts = [part("x", "chat", pod("10.1.0.1", "a", ready=True)), part("y", "chat", pod("10.1.0.1", "a", ready=False))]
    (endpoint,) = snapshot([llmdeployment("chat")], parts)["chat"]
    assert endpoint.ready


@pytest.mark.parametrize(
    ("rules", "start_up_seconds", "policy"),
    [
        (None, None, HoldPolicy()),
        ({}, None, HoldPolicy()),
        (
            {"holdTimeout": "10m", "maxHeld": 50, "after": "1h"},
            92,
            HoldPolicy(timeout_seconds=600.0, max_held=50, start_up_seconds=92.0),
        ),
        ({"holdTimeout": "0"}, 0, HoldPolicy(timeout_seconds=0.0, start_up_seconds=0.0)),
        ({"holdTimeout": "soon", "maxHeld": -1}, -1, HoldPolicy()),
        ({"holdTimeout": "48h", "maxHeld": 10**9}, 10**6, HoldPolicy()),
    ],
)
def test_policy_for_held_requests_is_read_from_the_llmdeployment(rules, start_up_seconds, policy):
    item = llmdeployment("chat")
    if rules is not None:
        item["spec"]["autoscaling"] = {"minReplicas": 0, "maxReplicas": 2, "scaleToZero": rules}
    if start_up_seconds is not None:
        item["status"]["capacity"] = {"startUpSeconds": start_up_seconds}
    assert models_of([item], []) == {"chat": ModelEndpoints(name="chat", endpoints=(), hold=policy, service="ns/chat")}


def llmadapter(name: str, deployment: str, *, served: str | None = None, since: str = "2026-01-02T00:00:00Z") -> dict:
    return {
        "kind": "LLMAdapter",
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": "1"},
        "spec": {"deploymentRef": {"name": deployment}, "source": "s3://a/b"},
        "status": {"servedName": {"name": served or name, "since": since}},
    }


async def test_adapters_have_the_replicas_of_their_model(api, published):
    api.items[MODELS] = [llmdeployment("chat")]
    api.items[SLICES] = [part("x", "chat", pod("10.1.0.1", "a", ready=True))]
    api.items[ADAPTERS] = [llmadapter("legal", "chat"), llmadapter("lost", "nowhere")]
    await until(published, {"chat": {"ns/a"}, "legal": {"ns/a"}})
    api.send(ADAPTERS, "ADDED", llmadapter("more", "chat"))
    await until(published, {"chat": {"ns/a"}, "legal": {"ns/a"}, "more": {"ns/a"}})
    api.send(ADAPTERS, "DELETED", llmadapter("legal", "chat"))
    await until(published, {"chat": {"ns/a"}, "more": {"ns/a"}})


def adapter_claim(**changes) -> object:
    return read_adapter(json.dumps(llmadapter("legal", "chat", **changes)).encode())


def test_names_of_models_and_adapters_follow_one_rule() -> None:
    talk = read_model(json.dumps(llmdeployment("talk", since="2026-01-03T00:00:00Z")).encode())
    chat = read_model(json.dumps(llmdeployment("chat")).encode())
    assert chat is not None and talk is not None
    slices = [
        msgspec.json.decode(json.dumps(part(n, n, pod("10.0.0.1", n, ready=True))), type=KubeSlice)
        for n in ("chat", "talk")
    ]
    found = snapshot_of([chat, talk], slices, NameScope.CLUSTER, [adapter_claim(served="talk")])
    assert {name: ([e.id for e in m.endpoints], m.adapter_of) for name, m in found.items()} == {
        "chat": (["ns/chat"], None),
        "talk": (["ns/chat"], "chat"),  # the adapter has claimed the name for longer
    }
    late = snapshot_of(
        [chat, talk], slices, NameScope.CLUSTER, [adapter_claim(served="talk", since="2027-01-01T00:00:00Z")]
    )
    assert late["talk"].adapter_of is None
    spaced = snapshot_of([chat], slices, NameScope.NAMESPACED, [adapter_claim()])
    assert {name: model.adapter_of for name, model in spaced.items()} == {"ns/chat": None, "ns/legal": "ns/chat"}


def test_an_adapter_serves_although_its_model_lost_its_name() -> None:
    older = read_model(json.dumps(llmdeployment("old", "chat", since="2025-01-01T00:00:00Z")).encode())
    chat = read_model(json.dumps(llmdeployment("chat")).encode())
    assert chat is not None and older is not None
    slices = [msgspec.json.decode(json.dumps(part("x", "chat", pod("10.0.0.1", "a", ready=True))), type=KubeSlice)]
    found = snapshot_of([older, chat], slices, NameScope.CLUSTER, [adapter_claim()])
    assert (found["legal"].adapter_of, [e.id for e in found["legal"].endpoints]) == ("", ["ns/a"])
    assert found["chat"].endpoints == ()


def test_an_unreadable_adapter_claims_nothing() -> None:
    assert read_adapter(b'{"metadata": {"name": "a"}, "spec": {"deploymentRef": 3}}') is None
