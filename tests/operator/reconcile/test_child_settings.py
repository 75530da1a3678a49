"""What the operator is told of the objects beside pods."""

import json

import pytest

from quire_operator.app.settings import parse_settings
from quire_operator.errors import SettingsProblem

PEERS = [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]


def test_untold_it_makes_no_policies_and_monitors_where_it_can() -> None:
    children = parse_settings([], {}).children
    assert children.features.network_peers is None
    assert children.features.monitoring is not None and children.features.served_kinds == frozenset()
    assert children.features.unique_served_names and children.discovery_seconds == 60.0


def test_what_it_is_told_arrives() -> None:
    argv = ["--network-policy-from", json.dumps(PEERS), "--monitor-labels", "release=prom, a.b/c=", "--discovery", "5s"]
    environ = {
        "QUIRE_OPERATOR_ALERT_LABELS": "team=ml",
        "QUIRE_OPERATOR_MONITOR_INTERVAL": "1m30s",
        "QUIRE_OPERATOR_RUNBOOK_URL": "https://example.org/runbooks/",
        "QUIRE_OPERATOR_SERVED_NAMES": "shared",
    }
    children = parse_settings(argv, environ).children
    monitoring = children.features.monitoring
    assert monitoring is not None and children.features.network_peers == tuple(PEERS)
    assert monitoring.pod_monitor_labels == {"release": "prom", "a.b/c": ""}
    assert (monitoring.rule_labels, monitoring.interval) == ({"team": "ml"}, "1m30s")
    assert monitoring.runbook_url == "https://example.org/runbooks/"
    assert (children.features.unique_served_names, children.discovery_seconds) == (False, 5.0)
    assert parse_settings(["--monitors", "off"], {}).children.features.monitoring is None


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--network-policy-from", "[", "no JSON"),
        ("--network-policy-from", "{}", "must be a list of NetworkPolicyPeers, got a mapping"),
        ("--network-policy-from", "[]", "an empty list would let everybody in"),
        ("--network-policy-from", "[{}]", "[0]: must be a mapping with ipBlock, namespaceSelector, podSelector"),
        ("--network-policy-from", '[{"podSelektor": {}}]', "[0].podSelektor: unknown field"),
        ("--network-policy-from", '[{"ipBlock": {}, "podSelector": {}}]', "make it two peers"),
        ("--monitor-labels", "release", "'release' is no label=value"),
        ("--alert-labels", "a=b c", "no label=value"),
        ("--monitor-interval", "15", 'must be a duration such as "15s"'),
        ("--monitor-interval", "", 'must be a duration such as "15s"'),
        ("--runbook-url", "two words", "must be a URL or a path"),
        ("--served-names", "some", "must be unique or shared"),
        ("--monitors", "on", "must be auto or off"),
        ("--discovery", "10ms", "must be a duration of at least 1s"),
    ],
)
def test_a_wrong_value_is_told_with_what_would_be_right(flag: str, value: str, says: str) -> None:
    with pytest.raises(SettingsProblem) as refused:
        parse_settings([flag, value], {})
    (detail,) = refused.value.details
    assert detail.startswith(f"{flag}: ") and says in detail
