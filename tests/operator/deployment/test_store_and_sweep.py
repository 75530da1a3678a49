"""The store: newer objects stay, deleted ones disappear, and a list finds what watches missed."""

from dataclasses import replace
from typing import Any

from quire_operator.deployment.observe import Unlisted, resync
from quire_operator.deployment.store import Cluster, Store
from quire_operator.kube.errors import Forbidden, PartlyForbidden
from quire_operator.kube.objects import Key, Ref

KEY = Key("prod", "chat")
DEPLOYMENT, SERVICE = Ref("Deployment", "chat"), Ref("Service", "chat")
KINDS = ("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "PersistentVolumeClaim")


async def settled(world: Any) -> Any:
    world.apply()
    await world.settle()
    return world.cluster.children[SERVICE]


async def test_an_older_version_never_replaces_a_newer_one(world: Any) -> None:
    child, store = await settled(world), Store()
    newer = replace(child, version=str(int(child.version) + 1), fingerprint="newer")
    assert store.put_child(KEY, newer)
    assert not store.put_child(KEY, child), "the late echo of what we knew before"
    assert not store.put_child(KEY, newer), "and our own write's is no news"
    assert store.children(KEY)[SERVICE] == newer


async def test_deletion_removes_no_later_object_of_the_same_name(world: Any) -> None:
    child, store = await settled(world), Store()
    again = replace(child, uid="again", version="9999")
    store.put_child(KEY, again)
    store.drop_child(KEY, SERVICE, child.uid)
    assert store.children(KEY) == {SERVICE: again}
    store.drop_child(KEY, SERVICE, "again")
    assert store.children(KEY) == {} and store.all_keys() == []


async def test_only_keys_of_existing_llmdeployments_are_live(world: Any) -> None:
    child, store = await settled(world), Store()
    store.put_child(KEY, child)
    assert (store.live_keys(), store.all_keys()) == ([], [KEY])
    resource = world.cluster.resources[KEY]
    store.put_resource(resource)
    assert store.live_keys() == [KEY]
    store.drop_resource(KEY, resource.uid)
    assert store.live_keys() == []


async def test_resync_fills_an_empty_store(world: Any, pod: Any) -> None:
    await settled(world)
    world.cluster.pods = {"a": pod("a")}
    store, news = Store(), []
    await resync(Cluster(kube=world.cluster, store=store, enqueue=news.append), KINDS)
    assert store.children(KEY) == {ref: child.after(None) for ref, child in world.cluster.children.items()}
    assert store.resource(KEY) == world.cluster.resources[KEY]
    assert [found.name for found in store.pods(KEY)] == ["a"]
    assert set(news) == {KEY}


async def test_resync_finds_missed_deletions(world: Any, pod: Any) -> None:
    await settled(world)
    world.cluster.pods = {"a": pod("a")}
    world.show()
    del world.cluster.children[SERVICE]
    world.cluster.pods.clear()
    news: list[Key] = []
    await resync(Cluster(kube=world.cluster, store=world.store, enqueue=news.append), KINDS)
    assert SERVICE not in world.store.children(KEY) and world.store.pods(KEY) == ()
    assert news == [KEY, KEY]
    world.cluster.resources.clear()
    await resync(Cluster(kube=world.cluster, store=world.store, enqueue=news.append), KINDS)
    assert world.store.live_keys() == []


async def test_resync_without_changes_enqueues_nothing(world: Any) -> None:
    await settled(world)
    news: list[Key] = []
    await resync(Cluster(kube=world.cluster, store=world.store, enqueue=news.append), KINDS)
    assert news == []


async def test_object_created_during_a_list_is_kept(world: Any) -> None:
    child = await settled(world)

    class Slow(type(world.cluster)):  # type: ignore[misc]
        async def list_children(self, kind: str) -> Any:
            if kind == "Service":  # the watch is faster than this list, which does not contain it yet
                world.store.put_child(KEY, replace(child, ref=Ref("Service", "late"), uid="late", version="9999"))
            async for found in super().list_children(kind):
                yield found

    slow = Slow(children=world.cluster.children, resources=world.cluster.resources)
    await resync(Cluster(kube=slow, store=world.store, enqueue=lambda key: None), KINDS)
    assert Ref("Service", "late") in world.store.children(KEY)


async def test_forbidden_namespace_keeps_its_state_and_hides_no_other(world: Any, pod: Any) -> None:
    await settled(world)
    world.cluster.pods = {"a": pod("a")}
    world.show()
    gone, other = Key("gone", "chat"), Key("other", "chat")
    for key in (gone, other):
        world.store.put_resource(replace(world.cluster.resources[KEY], key=key))

    async def refused(items: Any) -> Any:
        async for item in items:
            yield item
        raise PartlyForbidden("no", namespaces=frozenset({"gone"}))

    lists = {name: getattr(world.cluster, name) for name in ("list_resources", "list_children", "list_pods")}
    for name, listing in lists.items():
        setattr(type(world.cluster), name, lambda self, *kind, listing=listing: refused(listing(*kind)))
    try:
        found = await resync(Cluster(kube=world.cluster, store=world.store, enqueue=lambda key: None), KINDS)
    finally:
        for name, listing in lists.items():
            setattr(type(world.cluster), name, listing.__func__)
    assert found == Unlisted(namespaces=frozenset({"gone"}))
    assert world.store.resource(gone) is not None and world.store.resource(other) is None
    assert world.store.children(KEY).keys() == world.cluster.children.keys()


async def test_forbidden_kind_affects_no_other(world: Any, pod: Any) -> None:
    await settled(world)
    world.cluster.pods = {"a": pod("a")}

    class Limited(type(world.cluster)):  # type: ignore[misc]
        async def list_children(self, kind: str) -> Any:
            if kind == "Service":
                raise Forbidden("services is forbidden")
            async for found in super().list_children(kind):
                yield found

    limited = Limited(children=world.cluster.children, resources=world.cluster.resources, pods=world.cluster.pods)
    store, news = Store(), []
    found = await resync(Cluster(kube=limited, store=store, enqueue=news.append), KINDS)
    assert found == Unlisted(kinds=frozenset({"Service"}))
    assert {ref.kind for ref in store.children(KEY)} == {ref.kind for ref in world.cluster.children} - {"Service"}
    assert [seen.name for seen in store.pods(KEY)] == ["a"] and set(news) == {KEY}


async def test_unreadable_child_is_reported_and_blocks_no_other(world: Any) -> None:
    budget = Ref("PodDisruptionBudget", "chat")
    world.cluster.errors[f"read {budget}"] = [Forbidden("no permission")] * 10
    world.cluster.errors[f"create {budget}"] = [Forbidden("no permission")] * 10
    world.apply()
    await world.settle()
    assert DEPLOYMENT in world.cluster.children
    assert world.condition("Degraded") == "True Forbidden"
