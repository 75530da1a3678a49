"""The part of quire-operator's command line that says what children look like, beside what each spec says.

``settings`` adds these flags to its own and reads them with the same reader.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from quire_operator.domain.manifests.cluster_features import ClusterFeatures, Monitoring
from quire_operator.domain.manifests.network_policy import peer_problems
from quire_operator.domain.resource.quantities import parse_duration_seconds

T = TypeVar("T")

_LABEL_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_INTERVAL = re.compile(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?", re.ASCII)
_RUNBOOKS = re.compile(r"[\w./:~%@-]{1,1000}", re.ASCII)
_LEAST_DISCOVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    features: ClusterFeatures
    """As far as it is told; which optional kinds there are is found out."""
    discovery_seconds: float


class Options(Protocol):
    """What reads one option after the other, and collects what is wrong."""

    def read(self, name: str, convert: Callable[[str], T], default: T, what: str) -> T: ...


def read_child_settings(options: Options) -> ChildSettings:
    """Their part of the settings."""
    default = Monitoring()
    monitoring = Monitoring(
        interval=options.read("monitor_interval", _interval, default.interval, 'a duration such as "15s"'),
        pod_monitor_labels=options.read("monitor_labels", _labels, {}, "labels such as release=prometheus"),
        rule_labels=options.read("alert_labels", _labels, {}, "labels such as release=prometheus"),
        runbook_url=options.read("runbook_url", _runbooks, default.runbook_url, "a URL or a path"),
    )
    monitors = options.read("monitors", _one_of("auto", "off"), "auto", "auto or off")
    served_names = options.read("served_names", _one_of("unique", "shared"), "unique", "unique or shared")
    peers = options.read("network_policy_from", _peers, None, "NetworkPolicyPeers in JSON")
    return ChildSettings(
        features=ClusterFeatures(
            network_peers=peers,
            monitoring=monitoring if monitors == "auto" else None,
            unique_served_names=served_names == "unique",
        ),
        discovery_seconds=options.read("discovery", _duration, 60.0, 'a duration of at least 1s, such as "60s"'),
    )


def add_child_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the same names, with dashes."""
    children = parser.add_argument_group("what is made beside pods")
    children.add_argument(
        "--network-policy-from",
        metavar="JSON",
        help="the only NetworkPolicyPeers that may reach replicas (default: no policies, all may)",
    )
    children.add_argument(
        "--served-names", metavar="WORD", help="unique: two that serve one name conflict (default); or shared"
    )
    children.add_argument(
        "--monitors", metavar="WORD", help="PodMonitors and PrometheusRules: auto, where there are such kinds; or off"
    )
    children.add_argument("--monitor-interval", metavar="DURATION", help="between scrapes by PodMonitors (default 15s)")
    children.add_argument("--monitor-labels", metavar="LABELS", help="of PodMonitors, such as release=prometheus")
    children.add_argument("--alert-labels", metavar="LABELS", help="of PrometheusRules, such as release=prometheus")
    children.add_argument("--runbook-url", metavar="URL", help="in front of /NAME.md (default docs/runbooks)")
    children.add_argument(
        "--discovery", metavar="DURATION", help="how often such kinds and their objects are looked for (default 60s)"
    )


def _peers(text: str) -> tuple[Mapping[str, object], ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    problems = list(peer_problems(value))
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return tuple(value)


def _labels(text: str) -> Mapping[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{part!r} is no label=value")
        labels[name] = value
    return labels


def _interval(text: str) -> str:
    if not text or not _INTERVAL.fullmatch(text):
        raise ValueError
    return text


def _runbooks(text: str) -> str:
    if not _RUNBOOKS.fullmatch(text):
        raise ValueError
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return convert


def _duration(text: str) -> float:
    value = parse_duration_seconds(text)
    if value is None or value < _LEAST_DISCOVERY_SECONDS:
        raise ValueError
    return value
