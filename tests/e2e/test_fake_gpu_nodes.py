"""Replicas that request GPUs are scheduled on nodes that only simulate them.

The scenarios check the Kubernetes scheduler with the operator's pods, and the message when no GPU is free.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from e2e_support.gpu_nodes import GpuNodes, gpu_nodes
from e2e_support.manifests import small_llmdeployment
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.waiting import Stopwatch

pytestmark = pytest.mark.needs("fake-nodes")
PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """An LLMDeployment whose replicas need one GPU each, and its nodes."""

    chat: LLMDeployment
    nodes: GpuNodes
    space: Space

    def scale(self, replicas: int) -> None:
        """Scale with kubectl, as a user does."""
        self.space.kubectl("scale", "llmd", "chat", f"--replicas={replicas}")

    def taken(self) -> dict[str, int]:
        return self.nodes.taken(self.chat.serving_pods())


@pytest.fixture(scope="module")
def fleet(target: Target, make_space: MakeSpace) -> Iterator[Fleet]:
    with make_space("gpus") as space, gpu_nodes(target, space.name) as nodes:
        nodes.add(PER_NODE, PER_NODE, PER_NODE)
        gpu = {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": 1}}
        manifest = small_llmdeployment("chat", replicas=6, resources=gpu, podTemplate={"spec": nodes.place})
        chat = space.apply(manifest)
        yield Fleet(chat=chat, nodes=nodes, space=space)
        chat.delete()


def test_replicas_are_spread_over_the_nodes(fleet: Fleet) -> None:
    fleet.scale(6)
    fleet.chat.wait_ready(replicas=6)
    assert sorted(fleet.taken().values()) == [2, 2, 2]


def test_missing_gpus_are_reported_until_a_node_is_added(fleet: Fleet, report: Report) -> None:
    asked, there = 3 * PER_NODE + 2, 3 * PER_NODE
    fleet.scale(asked)

    condition = fleet.chat.wait_condition("Degraded", "True", reason="InsufficientGPU")
    assert "no node can run pod chat-" in condition.message and "Insufficient nvidia.com/gpu" in condition.message
    fleet.chat.until(lambda: len(fleet.chat.serving_pods()) == there or None, what=f"{there} serve", seconds=90)
    ready = fleet.chat.wait_condition("Ready", "False", reason="InsufficientGPU")
    fleet.chat.until(
        lambda: fleet.chat.conditions()["Ready"].message.startswith(f"{there} of {asked} replicas are ready; ") or None,
        what="Ready says how many there are",
        seconds=30,
    )
    assert "no node can run pod chat-" in ready.message
    assert set(fleet.taken().values()) == {PER_NODE}, "every GPU is taken"
    described = " ".join(fleet.space.kubectl("describe", "llmd", "chat").split())
    assert "Insufficient nvidia.com/gpu" in described and "InsufficientGPU" in described
    assert f"{there} of {asked} replicas are ready" in described

    watch = Stopwatch()
    (new,) = fleet.nodes.add(PER_NODE)
    fleet.chat.wait_ready(replicas=asked)
    report.figure("GPU node added to waiting replicas Ready", watch.seconds)
    fleet.chat.wait_condition("Degraded", "False", reason="AsExpected")
    assert fleet.taken()[new] == 2


def test_fifty_replicas_are_scheduled(fleet: Fleet, report: Report) -> None:
    fleet.nodes.add(32)
    watch = Stopwatch()
    fleet.scale(50)
    fleet.chat.wait_ready(replicas=50)
    report.figure("scaled to 50 replicas, all scheduled and Ready (without containers)", watch.seconds)
    taken = fleet.taken()
    assert sum(taken.values()) == 50
    *small, large = (taken[name] for name in fleet.nodes.names)
    assert all(count <= PER_NODE for count in small) and large <= 32

    fleet.scale(1)
    fleet.chat.wait_ready(replicas=1)
