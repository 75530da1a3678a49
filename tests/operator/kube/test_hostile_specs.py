"""A malicious LLMDeployment is rejected and does not affect others."""

from pathlib import Path

from kube_support.operators import Namespace, Operators

LEVELS = 9_900
"""Slightly less than the API server stores; by default Python's parser fails at a tenth of it."""


def test_deepest_storable_spec_affects_no_other(space: Namespace, operators: Operators, tmp_path: Path) -> None:
    metadata = f'"metadata": {{"name": "deep", "namespace": "{space.name}"}}'
    spec = '"model": {"source": "file:///models/demo"}, "podTemplate": ' + '{"a": ' * LEVELS + "1" + "}" * LEVELS
    file = tmp_path / "deep.json"
    file.write_text(f'{{"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment", {metadata}, "spec": {{{spec}}}}}')
    kubectl = space.server.kubectl
    kubectl("create", "-f", str(file))
    operator = operators.start(*space.flags())
    space.apply("chat")
    space.wait_settled("chat")
    kubectl("wait", "-n", space.name, "--for=condition=Degraded", "llmd/deep", "--timeout=20s")
    message = '{.status.conditions[?(@.type=="Degraded")].message}'
    told = kubectl("get", "llmd/deep", "-n", space.name, "-o", f"jsonpath={message}")
    assert "spec.podTemplate: must be nested at most 50 levels deep" in told
    assert not operator.said("the watches ended")
    kubectl("delete", "llmd/deep", "-n", space.name, "--wait=false")
    operator.kill()
