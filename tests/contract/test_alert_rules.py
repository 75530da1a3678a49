"""The alerts of an LLMDeployment, run by promtool on series with the engine's own names and buckets."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support.prometheus import promtool
from specs import valid_spec

from quire_common.contract import engine as engine_metrics
from quire_engine.api.metrics import TIME_TO_FIRST_TOKEN
from quire_operator.api import Spec
from quire_operator.api.names import LABEL_DEPLOYMENT
from quire_operator.deployment import network
from quire_operator.deployment.manifests import Monitoring

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
MINUTES = 60
LATE, FULL = "QuireTimeToFirstTokenHigh", "QuireAtMaxReplicas"


def spec_of(threshold: str) -> Spec:
    targets = {"timeToFirstToken": {"percentile": 95, "threshold": threshold}}
    return valid_spec(autoscaling={"maxReplicas": 2, "targets": targets})


def series(name: str, values: str, *, deployment: str = "chat", **labels: str) -> dict[str, str]:
    """Return one series of a pod, with the labels that our PodMonitor gives it."""
    all_labels = {"namespace": "prod", network.SERIES_LABEL: deployment, "pod": "chat-a", "engine": "0"} | labels
    text = ",".join(f'{key}="{value}"' for key, value in all_labels.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def waits(
    per_minute: int, seconds: float, *, deployment: str = "chat", late_share: float = 1.0
) -> list[dict[str, str]]:
    """Return first tokens in the engine's own buckets: ``late_share`` of them wait long, the others briefly."""
    quick = per_minute * (1 - late_share)
    counts = {bound: per_minute if seconds <= bound else quick for bound in (*TIME_TO_FIRST_TOKEN, float("inf"))}
    return [
        series(
            engine_metrics.FIRST_TOKEN_WAIT_BUCKET,
            f"0+{count:g}x{MINUTES}",
            deployment=deployment,
            le="+Inf" if bound == float("inf") else f"{bound}",
        )
        for bound, count in counts.items()
    ]


def queue(values: str, *, pods: tuple[str, ...] = ("chat-a", "chat-b"), **labels: str) -> list[dict[str, str]]:
    return [
        row
        for pod in pods
        for row in (
            series(engine_metrics.WAITING, values, pod=pod, **labels),
            series(engine_metrics.RUNNING, f"8x{MINUTES}", pod=pod, **labels),
        )
    ]


Case = tuple[list[dict[str, str]], set[str]]
CASES: dict[str, Case] = {
    "as it should be": (waits(600, 0.4) + queue(f"0x{MINUTES}"), set()),
    "first tokens late": (waits(600, 3.0), {LATE}),
    "a twentieth late is what was allowed": (waits(600, 3.0, late_share=0.04), set()),
    "a tenth late is not": (waits(600, 3.0, late_share=0.1), {LATE}),
    "later than any bucket": (waits(600, 10_000.0), {LATE}),
    "another's first tokens late": (waits(600, 3.0, deployment="chat-2"), set()),
    "no requests at all": (waits(0, 3.0), set()),
    "full and waiting": (queue(f"3x{MINUTES}"), {FULL}),
    "full, and once without a queue": (queue(f"3 3 3 0 3x{MINUTES}"), {FULL}),
    "full, the queue emptied each third minute": (queue("3 3 0 " * (MINUTES // 3)), set()),
    "full and no request waits": (queue(f"0x{MINUTES}"), set()),
    "waiting, with room for one more": (queue(f"3x{MINUTES}", pods=("chat-a",)), set()),
    "one of two, scraped by two jobs": (
        queue(f"3x{MINUTES}", pods=("chat-a",), job="a") + queue(f"3x{MINUTES}", pods=("chat-a",), job="b"),
        set(),
    ),
    "another is full": (queue(f"3x{MINUTES}", deployment="other"), set()),
    "no series at all": ([], set()),
}


def rule_file(folder: Path, spec: Spec) -> Path:
    rule = network.prometheus_rule(spec, Monitoring())
    assert rule is not None
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(rule))
    return file


def firing(spec: Spec, alerts: set[str]) -> list[dict[str, Any]]:
    rule: Any = network.prometheus_rule(spec, Monitoring())
    (group,) = rule["groups"]
    return [
        {
            "eval_time": f"{MINUTES - 10}m",
            "alertname": entry["alert"],
            "exp_alerts": [{"exp_labels": entry["labels"]}] if entry["alert"] in alerts else [],
        }
        for entry in group["rules"]
    ]


def tried(folder: Path, spec: Spec, cases: Mapping[str, Case]) -> subprocess.CompletedProcess[str]:
    rule: Any = yaml.safe_load(rule_file(folder, spec).read_text())
    for entry in rule["groups"][0]["rules"]:
        del entry["annotations"]  # otherwise they would have to be expected word by word
    (folder / "rules.yaml").write_text(yaml.safe_dump(rule))
    tests = [
        {"name": name, "interval": "1m", "input_series": rows, "alert_rule_test": firing(spec, alerts)}
        for name, (rows, alerts) in cases.items()
    ]
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    return promtool("test", "rules", "tests.yaml", folder=folder)


@pytest.mark.cluster
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    done = tried(tmp_path, spec_of("1s"), CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize(("threshold", "alerts"), [("300ms", {LATE}), ("600ms", set())])
def test_a_threshold_between_two_buckets_is_met_within_a_bucket(
    tmp_path: Path, threshold: str, alerts: set[str]
) -> None:
    """All first tokens wait between 0.25 and 0.5 s; a histogram places them above 300 ms and below 600 ms."""
    done = tried(tmp_path, spec_of(threshold), {"between": (waits(600, 0.4), alerts)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cluster
def test_prometheus_accepts_the_rules_with_their_texts(tmp_path: Path) -> None:
    file = rule_file(tmp_path, spec_of("1s"))
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", file.name, folder=tmp_path)
    assert done.returncode == 0 and "2 rules found" in done.stdout, done.stdout + done.stderr


def test_each_alert_has_a_runbook() -> None:
    rule: Any = network.prometheus_rule(spec_of("1s"), Monitoring())
    for entry in rule["groups"][0]["rules"]:
        text = (RUNBOOKS / f"{entry['alert']}.md").read_text()
        assert text.startswith(f"# {entry['alert']}\n") and entry["expr"].split("(")[0] in text


def test_pod_label_maps_to_the_series_label() -> None:
    """Prometheus replaces each character that its labels may not have by an underscore."""
    assert "".join(c if c.isalnum() else "_" for c in LABEL_DEPLOYMENT) == network.SERIES_LABEL
