"""The chart's alerts as rendered, tested by promtool; each alert has a runbook and each runbook an alert."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import recording
from chart_support.alert_cases import CASES, Case
from chart_support.documents import Documents, of_kind
from chart_support.prometheus import promtool
from chart_support.values import EVERYTHING

from quire_cluster.helm import Helm
from quire_engine.api.metrics import FINISH_REASONS
from quire_operator.autoscaling.demand import Reason
from quire_operator.deployment.pod_failures import FailureReason
from quire_operator.kube.errors import ClusterError

ROOT = Path(__file__).parents[2]
CHART, RUNBOOKS = ROOT / "charts" / "quire", ROOT / "docs" / "runbooks"
ENABLED: dict[str, Any] = {"monitoring": {"alerts": {"enabled": True}}}
PER_RESOURCE = {"QuireTimeToFirstTokenHigh", "QuireAtMaxReplicas"}
"""The alerts that the operator creates for each LLMDeployment, because they depend on its spec."""


def rules(documents: Documents) -> Iterator[dict[str, Any]]:
    for document in of_kind(documents, "PrometheusRule"):
        for group in document["spec"]["groups"]:
            yield from group["rules"]


@pytest.fixture(scope="module")
def defaults(helm: Helm) -> dict[str, dict[str, Any]]:
    """Return the rules by name, with the chart's default thresholds."""
    return {rule["alert"]: rule for rule in rules(helm.template(ENABLED))}


@pytest.mark.parametrize("values", [ENABLED, EVERYTHING], ids=["defaults", "everything"])
def test_promtool_accepts_the_rules(helm: Helm, tmp_path: Path, values: dict[str, Any]) -> None:
    documents = of_kind(helm.template(values), "PrometheusRule")
    assert len(documents) == 3
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(document["spec"]))
    checked = promtool("check", "rules", "--lint-fatal", "0.yaml", "1.yaml", "2.yaml", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("SUCCESS") == 3


def test_each_alert_has_a_test_case(defaults: dict[str, Any]) -> None:
    assert {case.alert for case in CASES} == defaults.keys()


def firing(case: Case, minute: int, expected: list[dict[str, str]]) -> dict[str, Any]:
    """Return promtool's check of all firing alerts with that name at one time."""
    selector = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    samples = [
        {"labels": "ALERTS{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}", "value": 1}
        for labels in expected
    ]
    return {"expr": selector, "eval_time": f"{minute}m", "exp_samples": samples}


def trial(case: Case, rule: dict[str, Any]) -> dict[str, Any]:
    """Return a case in promtool's format."""
    labels = {**case.labels, **rule["labels"]}
    told = {
        "summary": case.summary,
        "description": case.description,
        "runbook_url": f"docs/runbooks/{case.alert}.md",
    }
    alert = {"alertname": case.alert, "alertstate": "firing", **labels}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{case.fires}m",
                "alertname": case.alert,
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": told}],
            }
        ],
        "promql_expr_test": [
            firing(case, case.fires, [alert]),
            *(firing(case, minute, []) for minute in case.quiet),
        ],
    }


def test_alerts_fire_as_expected_with_values_in_the_text(defaults: dict[str, Any], tmp_path: Path) -> None:
    """All cases run at once; promtool names those that failed."""
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": name, "rules": [rule]} for name, rule in defaults.items()]})
    )
    trials = [{"name": case.alert, **trial(case, defaults[case.alert])} for case in CASES]
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": trials}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", "test.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_query_exported_metrics_by_existing_labels(defaults: dict[str, Any]) -> None:
    """The cases above are only as true as the names in them."""
    exported: dict[str, set[str]] = {}
    for line in recording.openmetrics().splitlines():
        if match := re.match(r"([a-z_:]+)\{(.*)\} ", line):
            exported.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2]))
    for rule in defaults.values():
        expression = _by_name(rule["expr"])
        names = re.findall(r"(?:vllm:|quire_)[a-z_]+", expression)
        assert names and set(names) <= exported.keys(), expression
        asked = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")}
        asked |= set(re.findall(r'(\w+)[!=]=?~?"', expression))
        assert asked <= set.union(*(exported[name] for name in names)), expression


def test_label_values_in_alerts_exist(defaults: dict[str, Any]) -> None:
    """A value that never occurs would make an alert that never fires, or one that always does."""
    said = {
        "reason": {
            *(reason.value for reason in (*Reason, *FailureReason)),
            *(kind.__name__ for kind in ClusterError.__subclasses__()),
            "Complete",
        },
        "type": {"Progressing"},
        "status": {"False"},
        "state": {"asked", "ready", "free", "cached"},
        "finished_reason": set(FINISH_REASONS),
        "code": {"5.."},
    }
    for rule in defaults.values():
        for label, words in re.findall(r'(\w+)[!=]=?~?"([^"]*)"', _by_name(rule["expr"])):
            assert set(words.split("|")) <= said[label], (rule["alert"], words)


def _by_name(expression: str) -> str:
    """Return the expression with one of the two names that a selector may match in its labels."""
    return re.sub(r'\{__name__=~"(\w+)\((\w+)\|\w+\)(\w+)"(?:, )?', r"\1\2\3{", expression)


def test_alert_has_severity_summary_and_runbook(defaults: dict[str, Any]) -> None:
    for name, rule in defaults.items():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


def test_thresholds_runbooks_and_labels_are_values(helm: Helm) -> None:
    documents = helm.template(EVERYTHING)
    made = {rule["alert"]: rule for rule in rules(documents)}
    assert made["QuireFreeKVBlocksLow"]["expr"].endswith("< 7.5")
    assert made["QuireQueueNotDraining"]["for"] == "3m"
    assert "QuireEngineRestarting" not in made
    urls = {rule["annotations"]["runbook_url"] for rule in made.values()}
    assert urls == {f"https://runbooks.example/quire/{name}.md" for name in made}
    assert all(d["metadata"]["labels"]["release"] == "prometheus" for d in of_kind(documents, "PrometheusRule"))
    assert "${" not in str(made)


def test_every_threshold_is_one_of_an_alert() -> None:
    thresholds = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["alerts"]["thresholds"]
    used = {name for file in (CHART / "alerts").glob("*.yaml") for name in re.findall(r"\$\{(\w+)\}", file.read_text())}
    assert used == thresholds.keys() | {"runbooks"}


# --- runbooks ---


def test_each_alert_has_a_runbook_and_each_runbook_an_alert(defaults: dict[str, Any]) -> None:
    assert {file.stem for file in RUNBOOKS.glob("*.md") if file.stem != "README"} == defaults.keys() | PER_RESOURCE


@pytest.mark.parametrize("file", sorted(RUNBOOKS.glob("Quire*.md")), ids=lambda file: file.stem)
def test_runbook_has_meaning_diagnosis_and_remedy(file: Path) -> None:
    text = file.read_text()
    assert text.startswith(f"# {file.stem}\n")
    assert len(re.findall(r"^## ", text, re.MULTILINE)) >= 3
    assert "kubectl" in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (file.parent / link).exists(), link


def test_the_list_of_runbooks_has_them_all() -> None:
    listed = set(re.findall(r"\((Quire\w+)\.md\)", (RUNBOOKS / "README.md").read_text()))
    assert listed == {file.stem for file in RUNBOOKS.glob("Quire*.md")}


def fields(schema: dict[str, Any], path: str = "spec") -> Iterator[str]:
    """Yield the paths of the CRD's fields, as users write them."""
    yield path
    for name, child in schema.get("properties", {}).items():
        yield from fields(child, f"{path}.{name}")


def values(tree: object, path: str = "") -> Iterator[str]:
    yield path
    for name, child in tree.items() if isinstance(tree, dict) else ():
        yield from values(child, f"{path}.{name}".lstrip("."))


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Return what a runbook may mention, by prefix: fields of the CRD, values of the chart, metrics."""
    (version,) = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    metrics = {re.sub(r"_bucket$", "", line.partition("{")[0]) for line in recording.openmetrics().splitlines()}
    return {
        r"spec\.[a-zA-Z.]+[a-zA-Z]": {*fields(schema["spec"]), "spec.groups"},
        r"(?:operator|gateway|monitoring|rbac)\.[a-z][a-zA-Z.]+[a-zA-Z]": set(
            values(yaml.safe_load((CHART / "values.yaml").read_text()))
        ),
        r"(?:vllm:|quire_)(?!dev_)[a-z_]+": metrics,
    }


@pytest.mark.parametrize("file", sorted(RUNBOOKS.glob("*.md")), ids=lambda file: file.stem)
def test_runbook_references_exist(known: dict[str, set[str]], file: Path) -> None:
    text = _by_name(file.read_text())
    for pattern, there in known.items():
        said = {re.sub(r"_bucket$", "", word) for word in re.findall(rf"(?<![\w./-]){pattern}", text)}
        assert said <= there, said - there
