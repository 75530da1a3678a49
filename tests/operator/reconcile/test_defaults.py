"""The defaults in force: read from ConfigMaps, applied to what the store shows, and reported."""

import asyncio
from typing import Any

import pytest

from quire_operator.adapters.kubernetes.default_maps import _parsed
from quire_operator.domain.cluster_state.observed import Key, Ref
from quire_operator.ports import ClusterError, DefaultMap, Forbidden, Unavailable
from quire_operator.reconcile.defaults import DefaultsBook
from quire_operator.reconcile.reconciler import Reconciler
from quire_operator.reconcile.store import Store

KEY, DEPLOYMENT = Key("prod", "chat"), Ref("Deployment", "chat")


class Maps:
    """Implements ``ports.DefaultMaps``."""

    def __init__(self) -> None:
        self.maps: dict[str, DefaultMap] = {}
        self.error: ClusterError | None = None
        self.version = 0

    def put(self, namespace: str, document: object, *, problem: str = "") -> None:
        self.version += 1
        self.maps[namespace] = DefaultMap(
            namespace=namespace, version=str(self.version), document=document, problem=problem
        )

    async def list_defaults(self) -> list[DefaultMap]:
        if self.error is not None:
            raise self.error
        return list(self.maps.values())


@pytest.fixture
def defaulted(world: Any) -> Any:
    """Return a world whose store applies defaults; the operator is in the namespace quire."""
    world.maps, world.changes = Maps(), []

    def changed() -> None:
        world.changes.append(1)
        world.store.note_new_defaults()

    world.defaults = DefaultsBook(maps=world.maps, namespace="quire", changed=changed)
    world.store._overlay = world.defaults.applied_to
    return world


def image(world: Any) -> str:
    body: Any = world.cluster.manifests[DEPLOYMENT].body
    return str(body["spec"]["template"]["spec"]["containers"][0]["image"])


async def test_a_change_of_defaults_reaches_pods_and_status(defaulted: Any) -> None:
    defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:1"}})
    assert await defaulted.defaults.refresh()
    defaulted.apply()
    await defaulted.settle()
    assert image(defaulted) == "registry.example/cluster:1"
    assert defaulted.status["defaults"] == [{"field": "engine.image", "configMap": "quire/quire-defaults"}]

    defaulted.maps.put("prod", {"engine": {"image": "registry.example/team:1"}})
    await defaulted.defaults.refresh()
    assert len(defaulted.changes) == 2
    await defaulted.settle()
    assert image(defaulted) == "registry.example/team:1"
    assert defaulted.status["defaults"] == [{"field": "engine.image", "configMap": "prod/quire-defaults"}]

    defaulted.apply(engine={"image": "registry.example/own:1"})
    await defaulted.settle()
    assert image(defaulted) == "registry.example/own:1"
    assert "defaults" not in defaulted.status


async def test_defaults_that_change_during_a_pass_bypass_no_canary(defaulted: Any, monkeypatch: Any) -> None:
    rollout = {"strategy": "Canary"}
    defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:1"}})
    await defaulted.defaults.refresh()
    defaulted.apply(rollout=rollout)
    await defaulted.serve()
    kind = type(defaulted.cluster)
    write = kind.write_status

    async def write_and_change(self: Any, resource: Any, status: Any) -> Any:
        if len(defaulted.changes) == 1:
            defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:2"}})
            await defaulted.defaults.refresh()
        return await write(self, resource, status)

    monkeypatch.setattr(kind, "write_status", write_and_change)
    defaulted.apply(rollout=rollout, autoscaling={"minReplicas": 1, "maxReplicas": 2})  # its first number is persisted
    await defaulted.settle()
    assert len(defaulted.changes) == 2
    assert (image(defaulted), defaulted.status["rollout"]["phase"]) == ("registry.example/cluster:1", "Starting")


async def test_an_unchanged_list_changes_nothing(defaulted: Any) -> None:
    defaulted.maps.put("quire", {"engine": {"maxModelLength": 512}})
    await defaulted.defaults.refresh()
    defaulted.apply()
    await defaulted.settle()
    shown = defaulted.store.resource(KEY)
    await defaulted.defaults.refresh()
    assert len(defaulted.changes) == 1
    assert defaulted.store.resource(KEY) is shown, "parsed values are kept by identity"


async def test_followed_defaults_are_known_at_once_and_then_polled(
    defaulted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The webhook of a process that does not lead reviews with them."""
    polled = asyncio.Event()

    async def slept(seconds: float) -> None:
        assert seconds == 15.0
        polled.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("quire_operator.reconcile.defaults.asyncio.sleep", slept)
    defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:1"}})
    defaulted.apply()
    following = asyncio.create_task(defaulted.defaults.follow())
    await polled.wait()
    following.cancel()
    assert defaulted.store.resource(KEY).body["spec"]["engine"]["image"] == "registry.example/cluster:1"


async def test_late_list_replaces_no_newer_defaults(defaulted: Any) -> None:
    """The process that begins to lead reads the defaults while it polls them."""
    arrived, answers = asyncio.Event(), []

    async def listed() -> list[DefaultMap]:
        found = list(defaulted.maps.maps.values())
        answers.append(1)
        if len(answers) == 1:
            await arrived.wait()
        return found

    defaulted.maps.list_defaults = listed
    late = asyncio.create_task(defaulted.defaults.refresh())
    await asyncio.sleep(0)
    defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:1"}})
    reading = asyncio.create_task(defaulted.defaults.load())
    await asyncio.sleep(0)
    arrived.set()
    await asyncio.gather(late, reading)
    defaulted.apply()
    assert defaulted.store.resource(KEY).body["spec"]["engine"]["image"] == "registry.example/cluster:1"


async def test_an_invalid_default_is_reported_and_does_not_apply(defaulted: Any) -> None:
    defaulted.maps.put("prod", {"engine": {"maxModelLength": -1, "image": "registry.example/team:1"}})
    await defaulted.defaults.refresh()
    defaulted.apply()
    await defaulted.settle()
    assert image(defaulted) == "registry.example/team:1"
    assert defaulted.condition("Degraded") == "True InvalidDefaults"
    assert "ConfigMap prod/quire-defaults: data.spec: spec.engine.maxModelLength" in defaulted.message("Degraded")


async def test_known_defaults_are_kept_during_an_outage(defaulted: Any) -> None:
    defaulted.maps.put("quire", {"engine": {"image": "registry.example/cluster:1"}})
    await defaulted.defaults.refresh()
    defaulted.maps.error = Unavailable("it is away")
    assert not await defaulted.defaults.refresh()
    defaulted.apply()
    await defaulted.settle()
    assert image(defaulted) == "registry.example/cluster:1"


@pytest.mark.parametrize("error", [Unavailable("away"), Forbidden("not yet")])
async def test_nothing_is_reconciled_before_defaults_are_known(
    defaulted: Any, error: ClusterError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start without them would replace the replicas of all LLMDeployments, and with them once more."""
    monkeypatch.setattr("quire_operator.reconcile.defaults._RETRY_SECONDS", 0.0)
    tries = []

    async def listed() -> list[DefaultMap]:
        tries.append(1)
        if len(tries) < 4:
            raise error
        return []

    defaulted.maps.list_defaults = listed
    await defaulted.defaults.load()
    assert len(tries) == 4


async def test_no_defaults_without_the_permission(
    defaulted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire_operator.reconcile.defaults._RETRY_SECONDS", 0.0)
    defaulted.maps.error = Forbidden("no")
    await defaulted.defaults.load()
    assert caplog.text.count("check the operator's role") == 1


@pytest.mark.parametrize(
    ("text", "document", "problem"),
    [
        ("engine:\n  image: a/b:1\n", {"engine": {"image": "a/b:1"}}, ""),
        ("", {}, ""),
        (None, None, "is required"),
        ("a: [", None, "is not YAML"),
        ("a: &x [1]\nb: *x\n", None, "aliases are not supported"),
        ("!!python/object:os.system {}", None, "is not YAML"),
        ("x" * 70_000, None, "at most 65536 characters"),
        ("[" * 5_000, None, "is not YAML"),
    ],
)
def test_a_config_map_contains_yaml(text: str | None, document: object, problem: str) -> None:
    found, complaint = _parsed(text)
    assert found == document
    assert problem in complaint and bool(problem) == bool(complaint)


def test_store_without_defaults_returns_specs_unchanged(world: Any) -> None:
    world.apply()
    assert world.store.resource(KEY) is world.store._families[KEY].resource
    assert isinstance(world.reconciler, Reconciler) and isinstance(world.store, Store)
