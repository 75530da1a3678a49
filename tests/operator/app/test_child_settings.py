"""The settings of children other than pods."""

import json

import pytest

from quire_common.errors import FlagsError
from quire_common.served_names import NameScope
from quire_operator.app.settings import parse_settings

PEERS = [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]


def test_defaults_create_monitors_and_no_policies() -> None:
    settings = parse_settings([], {})
    assert settings.features.network_peers is None
    assert settings.features.monitoring is not None and settings.features.served_kinds == frozenset()
    assert settings.features.served_names is NameScope.CLUSTER and settings.discovery_seconds == 60.0


def test_every_flag_reaches_the_settings() -> None:
    argv = ["--network-policy-from", json.dumps(PEERS), "--monitor-labels", "release=prom, a.b/c=", "--discovery", "5s"]
    environ = {
        "QUIRE_OPERATOR_ALERT_LABELS": "team=ml",
        "QUIRE_OPERATOR_MONITOR_INTERVAL": "1m30s",
        "QUIRE_OPERATOR_RUNBOOK_URL": "https://example.org/runbooks/",
        "QUIRE_OPERATOR_SERVED_NAMES": "shared",
    }
    settings = parse_settings(argv, environ)
    monitoring = settings.features.monitoring
    assert monitoring is not None and settings.features.network_peers == tuple(PEERS)
    assert monitoring.pod_monitor_labels == {"release": "prom", "a.b/c": ""}
    assert (monitoring.rule_labels, monitoring.interval) == ({"team": "ml"}, "1m30s")
    assert monitoring.runbook_url == "https://example.org/runbooks/"
    assert (settings.features.served_names, settings.discovery_seconds) == (None, 5.0)
    assert parse_settings(["--monitors", "off"], {}).features.monitoring is None


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--network-policy-from", "[", "not JSON"),
        ("--network-policy-from", "{}", "must be a list of NetworkPolicyPeers, got a mapping"),
        ("--network-policy-from", "[]", "an empty list would let everybody in"),
        ("--network-policy-from", "[{}]", "[0]: must be a mapping with ipBlock, namespaceSelector, podSelector"),
        ("--network-policy-from", '[{"podSelektor": {}}]', "[0].podSelektor: unknown field"),
        ("--network-policy-from", '[{"ipBlock": {}, "podSelector": {}}]', "make it two peers"),
        ("--monitor-labels", "release", "'release' is not label=value"),
        ("--alert-labels", "a=b c", "not label=value"),
        ("--monitor-interval", "15", 'expected a duration such as "15s"'),
        ("--monitor-interval", "", 'expected a duration such as "15s"'),
        ("--runbook-url", "two words", "expected a URL or a path"),
        ("--served-names", "some", "expected one of unique, namespaced, shared"),
        ("--monitors", "on", "expected one of auto, off"),
        ("--discovery", "10ms", "expected a duration of at least 1 s"),
    ],
)
def test_wrong_value_is_a_problem_with_the_expected_one(flag: str, value: str, says: str) -> None:
    with pytest.raises(FlagsError) as refused:
        parse_settings([flag, value], {})
    (detail,) = refused.value.problems
    assert detail.startswith(f"{flag}: ") and says in detail
