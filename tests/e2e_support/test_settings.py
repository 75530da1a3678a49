"""Settings of the scenarios from the environment."""

import pytest

from e2e_support.capabilities import EVERYTHING, Capability, capability, found_on, lacking
from e2e_support.errors import TargetUnavailable
from e2e_support.objects import Node
from e2e_support.settings import Settings, TheirCluster

THEIRS = {"KUBECONFIG": "/k", "QUIRE_E2E_REGISTRY": "registry.example/team", "QUIRE_E2E_TAG": "1"}


def test_our_own_cluster_is_used_without_kubeconfig() -> None:
    assert Settings.parse({}) == Settings(theirs=None, keep=False)
    assert Settings.parse({"KUBECONFIG": "", "QUIRE_E2E_TAG": "1"}).theirs is None


@pytest.mark.parametrize(
    ("said", "keep"), [({}, False), ({"KEEP": ""}, False), ({"KEEP": "0"}, False), ({"KEEP": "1"}, True)]
)
def test_keep_is_set_by_any_value_except_empty_and_zero(said: dict[str, str], keep: bool) -> None:
    assert Settings.parse(said).keep is keep


def test_external_cluster_needs_images_and_prometheus_is_optional() -> None:
    url = "http://prometheus:9090"
    assert Settings.parse(THEIRS | {"QUIRE_E2E_PROMETHEUS_URL": url}).theirs == TheirCluster(
        kubeconfig="/k", registry="registry.example/team", tag="1", prometheus_url=url
    )


@pytest.mark.parametrize(
    "missing", [{"QUIRE_E2E_REGISTRY"}, {"QUIRE_E2E_TAG"}, {"QUIRE_E2E_REGISTRY", "QUIRE_E2E_TAG"}]
)
def test_all_missing_settings_are_named_at_once(missing: set[str]) -> None:
    given = {name: value for name, value in THEIRS.items() if name not in missing}
    with pytest.raises(TargetUnavailable) as error:
        Settings.parse(given)
    named = {name for name in THEIRS if f"  {name}:" in str(error.value)}
    assert named == missing
    assert "unset KUBECONFIG" in str(error.value)


def test_each_missing_capability_is_explained_once() -> None:
    needs = [Capability.MACHINE, Capability.PROMETHEUS, Capability.MACHINE]
    assert lacking(needs, has=EVERYTHING) == ""
    assert lacking([], has=frozenset()) == ""
    why = lacking(needs, has=frozenset({Capability.TWO_NODES}))
    assert why.count("only our own cluster") == 1
    assert "QUIRE_E2E_PROMETHEUS_URL" in why


def test_an_unknown_capability_is_rejected_with_the_known_ones() -> None:
    assert capability("two-nodes") is Capability.TWO_NODES
    with pytest.raises(TargetUnavailable, match=r"needs\('gpu'\).*machine, prometheus, two-nodes, fake-nodes"):
        capability("gpu")


def node(name: str, *, ready: bool = True, schedulable: bool = True, fake: bool = False) -> Node:
    return Node(name=name, ip=None, is_ready=ready, is_schedulable=schedulable, is_fake=fake)


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node("a")], set()),
        ([node("a"), node("b")], {Capability.TWO_NODES}),
        ([node("a"), node("b", ready=False)], set()),
        ([node("a"), node("b", schedulable=False)], set()),
        ([node("a"), node("b", fake=True)], {Capability.FAKE_NODES}),
    ],
)
def test_capabilities_are_derived_from_nodes(nodes: list[Node], found: set[Capability]) -> None:
    assert found_on(nodes, prometheus_url="") == found
    assert found_on(nodes, prometheus_url="http://p") == found | {Capability.PROMETHEUS}
