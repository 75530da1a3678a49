"""Defaults for LLMDeployments in the chart: the ConfigMap that the operator reads."""

import yaml
from chart_support.documents import of_kind

from quire_cluster.helm import Helm
from quire_operator.domain.resource.defaults import CONFIG_MAP, KEY, read_defaults

DEFAULTS = {"engine": {"maxModelLength": 8192}, "podTemplate": {"spec": {"tolerations": [{"key": "gpu"}]}}}


def test_defaults_are_in_a_config_map_that_the_operator_reads(helm: Helm) -> None:
    (found,) = of_kind(helm.template({"operator": {"defaults": DEFAULTS}}), "ConfigMap")
    assert found["metadata"]["name"] == CONFIG_MAP
    read = read_defaults(yaml.safe_load(found["data"][KEY]), source="quire/quire-defaults")
    assert read.problems == ()
    assert read.values[("engine", "maxModelLength")] == 8192


def test_no_config_map_without_defaults(helm: Helm) -> None:
    assert of_kind(helm.template(), "ConfigMap") == []
