"""The commands in helm's notes."""

from e2e_support.notes import commands_of

NOTES = """\
quire 1.2 serves the LLMDeployments of all namespaces.

1. See that it runs:

     kubectl -n quire-system get pods

   quire publishes no images. These are taken from the nodes:
     quire-operator:1.2

2. Say what to serve:

     kubectl apply -f - <<'YAML'
     kind: LLMDeployment
     spec:
       model: {source: hf://org/name}
     YAML

3. Ask:

     kubectl port-forward service/gateway 8000:80 &
     curl http://127.0.0.1:8000/v1 \\
       -H 'Content-Type: application/json' \\
       -d '{}'
"""


def test_exactly_the_commands_are_extracted() -> None:
    assert commands_of(NOTES) == [
        "kubectl -n quire-system get pods",
        "kubectl apply -f - <<'YAML'\nkind: LLMDeployment\nspec:\n  model: {source: hf://org/name}\nYAML",
        "kubectl port-forward service/gateway 8000:80 &",
        "curl http://127.0.0.1:8000/v1 \\\n  -H 'Content-Type: application/json' \\\n  -d '{}'",
    ]
