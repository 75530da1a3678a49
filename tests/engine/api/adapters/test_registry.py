"""The names and versions of adapters: what is fetched, served, replaced and unloaded."""

from typing import Any

from quire_common.contract.adapters_file import AdapterEntry, AdapterFailure, AdapterState, Placement
from quire_engine.api.adapters import AdapterOrigin, AdapterRegistry


def entry(name: str, source: str = "/a", **fields: Any) -> AdapterEntry:
    return AdapterEntry(name=name, source=source, **fields)


def states(registry: AdapterRegistry, in_slots: tuple[int, ...] = ()) -> dict[str, AdapterState]:
    return {report.name: report.state for report in registry.reports(in_slots)}


def follow(registry: AdapterRegistry, *entries: AdapterEntry) -> tuple[list[int], list[int]]:
    """Return the numbers of the versions to fetch and to unload after the file lists these entries."""
    registry.follow_file(entries)
    actions = registry.take_actions()
    return [version.number for version in actions.fetch], actions.unload


def test_adapter_changes_from_downloading_to_loaded() -> None:
    registry = AdapterRegistry(["base"])
    assert follow(registry, entry("fr")) == ([1], [])
    assert states(registry) == {"fr": AdapterState.DOWNLOADING} and registry.served("fr") is None
    registry.loaded(1, rank=8, num_bytes=100)
    assert states(registry) == {"fr": AdapterState.READY}
    assert states(registry, (1,)) == {"fr": AdapterState.LOADED}
    served = registry.served("fr")
    assert served is not None and (served.number, served.rank, served.num_bytes) == (1, 8, 100)


def test_on_demand_adapter_is_fetched_at_the_first_request() -> None:
    registry = AdapterRegistry([])
    assert follow(registry, entry("fr", placement=Placement.ON_DEMAND)) == ([], [])
    assert states(registry) == {"fr": AdapterState.KNOWN} and registry.names == ["fr"]
    version = registry.wanted("fr")
    assert version is not None
    registry.demand(version)
    registry.demand(version)
    assert registry.take_actions().fetch == [version]


def test_changed_entry_is_reloaded_while_the_old_serves() -> None:
    registry = AdapterRegistry([])
    follow(registry, entry("fr"))
    registry.loaded(1, 8, 100)
    assert follow(registry, entry("fr")) == ([], [])
    for change, number in (({"generation": 1}, 2), ({"generation": 1, "revision": "b"}, 3), ({"source": "/b"}, 4)):
        fetched, _ = follow(registry, entry("fr", **change))
        assert fetched == [number]
        served = registry.served("fr")
        assert served is not None and served.number == number - 1
        registry.loaded(number, 8, 100)
        assert registry.take_actions().unload == [number - 1]


def test_failed_version_keeps_the_previous_one() -> None:
    registry = AdapterRegistry([])
    follow(registry, entry("fr"))
    registry.loaded(1, 8, 100)
    follow(registry, entry("fr", generation=1))
    registry.fail(2, AdapterFailure.RANK_TOO_HIGH, "rank 64")
    (report,) = registry.reports(())
    assert (report.state, report.reason, report.generation) == (AdapterState.FAILED, AdapterFailure.RANK_TOO_HIGH, 1)
    assert report.message == "rank 64; the version before it is still served"
    served = registry.served("fr")
    assert served is not None and served.number == 1
    assert follow(registry, entry("fr", generation=2)) == ([3], [2, 2])
    registry.loaded(3, 8, 100)
    assert registry.take_actions().unload == [1]


def test_adapters_removed_from_the_file_are_unloaded() -> None:
    registry = AdapterRegistry([])
    registry.put(entry("flag"), AdapterOrigin.FLAG)
    registry.put(entry("request"), AdapterOrigin.REQUEST)
    registry.take_actions()
    assert follow(registry, entry("a"), entry("b")) == ([3, 4], [])
    assert follow(registry, entry("b")) == ([], [3])
    assert sorted(states(registry)) == ["b", "flag", "request"]


def test_name_served_by_another_origin_is_kept() -> None:
    registry = AdapterRegistry([])
    registry.put(entry("fr", "/flag"), AdapterOrigin.FLAG)
    registry.take_actions()
    assert follow(registry, entry("fr", "/file")) == ([], [])
    assert follow(registry) == ([], [])
    version = registry.wanted("fr")
    assert version is not None and version.entry.source == "/flag"


def test_the_name_of_the_base_model_is_refused() -> None:
    registry = AdapterRegistry(["base"])
    assert follow(registry, entry("base"))[0] == []
    (report,) = registry.reports(())
    assert report.reason is AdapterFailure.INVALID and report.message == "the base model is served as base"
    assert registry.names == []


def test_reports_of_removed_versions_are_ignored() -> None:
    registry = AdapterRegistry([])
    follow(registry, entry("fr"))
    assert registry.remove("fr") and not registry.remove("fr")
    registry.loaded(1, 8, 100)
    registry.fail(1, AdapterFailure.INVALID, "late")
    assert registry.reports(()) == [] and registry.take_actions().unload == [1]


def test_a_replacement_drops_the_one_that_was_still_loading() -> None:
    registry = AdapterRegistry([])
    follow(registry, entry("fr"))
    assert follow(registry, entry("fr", generation=1)) == ([2], [1])
    registry.loaded(1, 8, 100)
    assert registry.served("fr") is None
    registry.loaded(2, 8, 100)
    served = registry.served("fr")
    assert served is not None and served.number == 2
