"""The autoscaler's metrics: each LLMDeployment's last decision, and no series of deleted ones."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire_operator.api import AutoscalingMode
from quire_operator.app.telemetry import ScalingTelemetry

LABELS = ("namespace", "name", "term", "input", "reason")


class Scraped:
    """A registry with the autoscaler's metrics, and the results of a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.telemetry = ScalingTelemetry(self.registry)
        self.decisions: dict[str, object] = {}
        self.telemetry.show(lambda: self.decisions, last_answer=lambda: 1234.0, gateways=lambda: (2, 1))

    def series(self, metric: str, **labels: str) -> dict[str, float]:
        """Return the values by the labels that are not given."""
        page = generate_latest(self.registry).decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == metric]
        return {
            ",".join(s.labels[label] for label in LABELS if label in s.labels and label not in labels): s.value
            for s in samples
            if labels.items() <= s.labels.items()
        }


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


def test_last_decision_is_exported_with_every_term(kit, scraped):
    story = kit.story(current=1, queue_depth=4)
    scraped.decisions = {"prod/chat": story.tick(kit.ready("a", running=10, waiting=12))}
    prefix = "quire_operator_autoscaling_"
    for name, value in {
        "desired_replicas": 3.0,
        "current_replicas": 1.0,
        "min_replicas": 1.0,
        "max_replicas": 10.0,
        "enforced": 1.0,
    }.items():
        assert scraped.series(prefix + name, namespace="prod", name="chat") == {"": value}, name
    need = scraped.series(f"{prefix}need_replicas", namespace="prod", name="chat")
    assert need == {"KVDemand": 0.0, "Concurrency": 2.75, "QueueDepth": 3.0}
    seen = scraped.series(f"{prefix}input", namespace="prod", name="chat")
    assert seen == {"ready": 1.0, "starting": 0.0, "fresh": 1.0, "waiting": 12.0, "running": 10.0}
    assert scraped.series(f"{prefix}reason") == {"prod,chat,QueueDepth": 1.0}


def test_metrics_age_is_that_of_the_oldest_sample(kit, scraped, monkeypatch):
    story = kit.story(current=2)
    scraped.decisions = {"prod/chat": story.tick(kit.ready("a", age=5.0), kit.ready("b", age=20.0))}
    monkeypatch.setattr("quire_operator.app.telemetry.time", lambda: story.time + 100)
    assert scraped.series("quire_operator_autoscaling_metrics_age_seconds") == {"prod,chat": 120.0}


def test_recommendation_is_exported_as_not_enforced(kit, scraped):
    story = kit.story(current=1, mode=AutoscalingMode.RECOMMEND)
    scraped.decisions = {"prod/chat": story.tick(kit.ready("a", running=10, waiting=5))}
    assert scraped.series("quire_operator_autoscaling_enforced") == {"prod,chat": 0.0}
    assert scraped.series("quire_operator_autoscaling_desired_replicas") == {"prod,chat": 2.0}


def test_series_disappear_with_resource_and_leadership(kit, scraped):
    decision = kit.story(current=1).tick(kit.ready("a"))
    name = "quire_operator_autoscaling_desired_replicas"
    scraped.decisions = {"prod/chat": decision, "prod/other": decision}
    assert scraped.series(name).keys() == {"prod,chat", "prod,other"}
    del scraped.decisions["prod/other"]
    assert scraped.series(name).keys() == {"prod,chat"}
    scraped.telemetry.hide()
    assert scraped.series(name) == scraped.series("quire_operator_gateways") == {}


def test_failures_of_prometheus_replicas_and_gateways_are_counted(scraped):
    scraped.telemetry.prometheus_failed("unauthorized")
    scraped.telemetry.prometheus_failed("unauthorized")
    scraped.telemetry.scrape_failed("timeout")
    assert scraped.series("quire_operator_prometheus_errors_total") == {"unauthorized": 2.0}
    assert scraped.series("quire_operator_replica_scrape_errors_total") == {"timeout": 1.0}
    assert scraped.series("quire_operator_prometheus_last_answer_timestamp_seconds") == {"": 1234.0}
    assert scraped.series("quire_operator_gateways") == {"": 2.0}
    assert scraped.series("quire_operator_gateway_answers") == {"": 1.0}
