"""A first installation: helm install, kubectl apply, a request; each command as in the README and the chart's notes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from e2e_support.kube import Kube
from e2e_support.release import Release, commands_of
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.scaling.looks import explain
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.traffic.prompts import load
from e2e_support.waiting import Stopwatch
from quire_cluster.ports import free_ports

pytestmark = pytest.mark.first
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The applied examples/demo.yaml."""

    chat: LLMDeployment
    space: Space
    seconds_to_ready: float


@pytest.fixture(scope="module")
def demo(make_space: MakeSpace) -> Iterator[Demo]:
    with make_space("demo") as space:
        watch = Stopwatch()
        space.kubectl("apply", "-f", str(DEMO))
        chat = space.llmdeployment("chat")
        chat.wait_ready()
        yield Demo(chat=chat, space=space, seconds_to_ready=watch.seconds)


def test_readme_commands_lead_to_an_answer(release: Release, demo: Demo, gateway_url: str, report: Report) -> None:
    commands = (ROOT / "README.md").read_text()
    assert "helm install quire charts/quire --namespace quire-system --create-namespace" in commands
    assert "kubectl apply -f examples/demo.yaml" in commands
    client = OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0, timeout=60)
    assert "chat" in [model.id for model in client.models.list()]
    known = next(prompt for prompt in load() if prompt.is_chat)
    messages = [{"role": message.role, "content": message.content} for message in known.messages]
    answer = client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=known.max_tokens, stream=True
    )
    words = [choice.delta.content or "" for chunk in answer for choice in chunk.choices]
    report.count_requests(1)
    assert "".join(words) == known.answer
    if release.installed_in is not None:
        report.figure("helm install to operator leading and gateway ready", release.installed_in)
    report.figure("kubectl apply to Ready", demo.seconds_to_ready)


def test_kubectl_get_shows_the_state(demo: Demo, release: Release) -> None:
    header, row = demo.space.kubectl("get", "llmd").splitlines()
    assert header.split() == ["NAME", "READY", "STATUS", "REPLICAS", "DESIRED", "MODEL", "AGE"]
    assert row.split()[:6] == ["chat", "True", "Serving", "1", "1", "file://./models/quire-demo"]
    wide = demo.space.kubectl("get", "llmd", "-o", "wide").splitlines()[1]
    assert wide.endswith(f"http://chat.{demo.space.name}.svc.cluster.local:8000/v1")
    listed = demo.space.kubectl("get", "quire", "-o", "name").split()
    assert listed == ["llmdeployment.quire.dev/chat"], "the category lists it"


def test_kubectl_describe_and_quire_explain_show_reasons(demo: Demo, target: Target) -> None:
    described = demo.space.kubectl("describe", "llmd", "chat")
    for condition in ("Ready", "Progressing", "Available", "ModelLoaded", "Autoscaling", "Degraded"):
        assert re.search(rf"Type: +{condition}\b", described), described
    assert "1 of 1 replicas are ready" in described
    assert "between 1 and 3" in explain(target.kube, demo.chat)


def test_the_commands_of_the_helm_notes_work(demo: Demo, release: Release, target: Target, tmp_path: Path) -> None:
    """The command for the model is run with a dry run only, because the model in the notes comes from a hub."""
    pods, apply, watch, describe, forward, ask = commands_of(release.notes())
    here = at_home_in(demo.space.name, target.kube, tmp_path / "kubeconfig")

    def shell(script: str) -> str:
        return target.kube.script(f"export KUBECONFIG={here}\n{script}", seconds=60)

    running = [line for line in shell(pods).splitlines() if "Running" in line]
    assert len(running) == len(release.operator_pods()) + len(release.gateway_pods()) == 4
    assert "llmdeployment.quire.dev/chat" in shell(apply.replace("kubectl apply", "kubectl apply --dry-run=server"))
    shell(f"exec {{seen}}< <(exec {watch}); grep --max-count=1 'chat  *True' <&$seen; kill $!")
    assert "Conditions" in shell(describe)
    (port,) = free_ports(1)
    script = f"{forward}\ntrap 'kill %1' EXIT\nuntil curl -so /dev/null 127.0.0.1:8000; do sleep 0.2; done\n{ask}"
    script = script.replace("8000:", f"{port}:").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    *_, said = shell(script).splitlines()  # port-forward talks as well
    answer = json.loads(said)
    assert answer["choices"][0]["message"]["content"]


def at_home_in(namespace: str, kube: Kube, file: Path) -> Path:
    """Return a kubeconfig whose default namespace is this one."""
    config = json.loads(kube.kubectl("config", "view", "--raw", "--flatten", "--output", "json"))
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    file.touch(mode=0o600)
    file.write_text(json.dumps(config))
    return file
