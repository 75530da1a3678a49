"""Specs that are known not to fit are not applied, and no hub, however slow, delays a pass for long."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire_common.model_memory import ModelConfig, ModelFacts, parse_model_config
from quire_operator.api import HubSource
from quire_operator.capacity import check as check_module
from quire_operator.capacity.check import CapacityCheck
from quire_operator.capacity.hub import HubReader, ModelUnknown
from quire_operator.kube.errors import Forbidden, Unavailable
from quire_operator.kube.objects import Ref

MODEL = {"source": "hf://org/big"}
CONFIG = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
GPU = {"limits": {"nvidia.com/gpu": 1}}


def facts(parameters: int) -> ModelFacts:
    config = parse_model_config(CONFIG)
    assert isinstance(config, ModelConfig)
    return ModelFacts(config=config, parameters=parameters, counted=True)


class Hub:
    """``HubFacts`` with chosen answers."""

    def __init__(self) -> None:
        self.answer: ModelFacts | ModelUnknown = facts(8 * 10**9)
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def facts(self, source: HubSource) -> ModelFacts:
        self.asked += 1
        await self.open.wait()
        if isinstance(self.answer, ModelUnknown):
            raise self.answer
        return self.answer

    async def aclose(self) -> None: ...


def gpus(mebibytes: int) -> list[dict[str, str]]:
    """Return the labels of the only node with GPUs."""
    return [{"nvidia.com/gpu.memory": str(mebibytes)}]


@pytest.fixture
async def checked(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the world with an operator that checks capacity."""
    monkeypatch.setattr(check_module, "_WAIT_SECONDS", 0.05)
    world.hub, world.cluster.nodes = Hub(), gpus(15_360)

    def restart() -> None:
        world.check = CapacityCheck(
            hub=HubReader(world.hub, now=world.clock),
            kube=world.cluster,
            now=world.clock,
            enqueue=world.enqueued.append,
        )
        world.start(capacity=world.check)

    world.restart_checking = restart
    restart()
    yield world
    await world.check.aclose()


async def test_no_child_is_created_if_the_model_does_not_fit(checked: Any) -> None:
    checked.apply(model=MODEL, resources=GPU)
    assert await checked.settle() == ["status", "event InsufficientGPUMemory"]
    assert checked.condition("Ready") == checked.condition("Degraded").replace("True", "False")
    assert checked.condition("Ready") == "False InsufficientGPUMemory"
    assert "is 15 GiB" in checked.message("Ready")
    assert await checked.reconciler.reconcile(next(iter(checked.cluster.resources))) == 60.0


@pytest.mark.parametrize(
    "fix",
    [
        lambda world: world.apply(model=MODEL, resources=GPU, engine={"kvCache": {"memoryPercent": 100}}),
        lambda world: setattr(world.cluster, "nodes", gpus(81_559)),
        lambda world: setattr(world.hub, "answer", facts(10**9)),
        lambda world: setattr(world.cluster, "nodes", gpus(81_559)) or world.restart_checking(),
    ],
    ids=["the spec", "the nodes", "the model", "another process"],
)
async def test_children_are_created_when_capacity_suffices(checked: Any, fix: Callable[[Any], None]) -> None:
    checked.cluster.nodes = gpus(18_500)
    checked.apply(model=MODEL, resources=GPU)
    assert "create Deployment chat" not in await checked.settle()
    checked.clock.time += 601.0
    fix(checked)
    made = await checked.settle(1)  # the earlier answer serves during the next lookup
    await asyncio.sleep(0)
    made += await checked.settle(2)
    assert "create Deployment chat" in made
    assert checked.condition("Degraded") == "False AsExpected"


async def test_a_draft_model_is_looked_up_and_counted(checked: Any) -> None:
    checked.hub.answer = facts(5 * 10**9)
    speculation = {"method": "DraftModel", "draft": {"source": "hf://org/draft"}}
    limits = {"limits": {"memory": "16Gi"}}
    checked.apply(model=MODEL, resources=limits, engine={"maxModelLength": 512})
    assert "create Deployment chat" in await checked.settle()
    checked.apply(model=MODEL, resources=limits, engine={"maxModelLength": 512, "speculation": speculation})
    assert "event InsufficientMemory" in await checked.settle()
    assert "draft model 9.31 GiB" in checked.message("Degraded")
    assert "remove spec.engine.speculation" in checked.message("Degraded")
    assert checked.hub.asked == 2


async def test_running_pods_stay_if_a_new_spec_does_not_fit(checked: Any) -> None:
    checked.hub.answer = facts(10**9)
    checked.apply(model=MODEL, resources=GPU)
    await checked.settle()
    checked.run_replicas()
    checked.apply(model={"source": "hf://org/larger"}, resources=GPU)
    checked.hub.answer = facts(8 * 10**9)
    assert await checked.settle() == ["status", "event InsufficientGPUMemory"]
    assert checked.condition("Available") == "True ReplicaReady"

    checked.apply(model=MODEL, resources=GPU)
    await checked.settle()
    assert checked.condition("Ready") == "True Serving"


CANARY_ROLLOUT = {"strategy": "Canary"}
CANARY = Ref("Deployment", "chat-canary")


async def serving_stable(checked: Any, *, mebibytes: int = 18_500, parameters: int = 10**9) -> None:
    """Let a spec that fits serve with strategy Canary."""
    checked.cluster.nodes = gpus(mebibytes)
    checked.hub.answer = facts(parameters)
    checked.apply(model=MODEL, resources=GPU, rollout=CANARY_ROLLOUT)
    await checked.serve()


async def test_no_canary_is_created_if_its_model_does_not_fit(checked: Any) -> None:
    await serving_stable(checked)
    checked.hub.answer = facts(8 * 10**9)
    checked.apply(model={"source": "hf://org/larger"}, resources=GPU, rollout=CANARY_ROLLOUT)
    await checked.settle()
    assert checked.condition("Ready") == "False InsufficientGPUMemory"
    assert checked.condition("Available") == "True ReplicaReady"
    assert CANARY not in checked.cluster.children

    checked.cluster.nodes = gpus(81_559)
    checked.clock.time += 61.0
    await checked.settle()
    assert checked.condition("Ready") == "True Serving" and CANARY in checked.cluster.children
    checked.cluster.nodes = gpus(18_500)
    checked.clock.time += 61.0
    await checked.settle()
    assert checked.condition("Degraded") == "True InsufficientGPUMemory", "it is applied, and its replicas start"
    checked.run_replicas(CANARY)
    await checked.settle()
    assert checked.condition("Degraded") == "False AsExpected"


@pytest.mark.parametrize("waits", [False, True], ids=["starts", "is paused"])
async def test_estimate_of_a_serving_stable_spec_blocks_no_canary(checked: Any, waits: bool) -> None:
    await serving_stable(checked, mebibytes=81_559, parameters=8 * 10**9)
    checked.cluster.nodes = gpus(18_500)
    checked.clock.time += 61.0
    fits = {"kvCache": {"memoryPercent": 100}}
    checked.apply(model=MODEL, resources=GPU, engine=fits, rollout=CANARY_ROLLOUT, paused=waits)
    await checked.settle()
    assert checked.condition("Ready") == "True Serving"
    assert (CANARY in checked.cluster.children) is not waits


async def test_late_capacity_problem_is_reported_only(checked: Any) -> None:
    checked.hub.open.clear()
    checked.apply(model=MODEL, resources=GPU)
    assert "create Deployment chat" in await checked.settle()
    assert checked.enqueued == []
    checked.hub.open.set()
    while not checked.enqueued:
        await asyncio.sleep(0)
    await checked.settle()
    assert checked.condition("Degraded") == "True InsufficientGPUMemory"
    assert checked.condition("Ready") == "False Starting"
    checked.run_replicas()
    await checked.settle()
    assert (checked.condition("Ready"), checked.condition("Degraded")) == ("True Serving", "False AsExpected")


@pytest.mark.parametrize("unreachable", [True, False])
async def test_model_unknown_to_the_hub_is_left_to_the_engine(checked: Any, unreachable: bool) -> None:
    checked.hub.answer = ModelUnknown("no such model", unreachable=unreachable)
    checked.apply(model=MODEL, resources=GPU)
    assert "create Deployment chat" in await checked.settle()
    await checked.settle()
    assert checked.hub.asked == 1
    checked.apply(model={"source": "hf://org/other"}, resources=GPU)
    await checked.settle()
    assert checked.hub.asked == (1 if unreachable else 2)


async def test_known_facts_are_kept_when_the_hub_is_down(checked: Any) -> None:
    checked.apply(model=MODEL, resources=GPU)
    await checked.settle()
    checked.hub.answer = ModelUnknown("down", unreachable=True)
    checked.clock.time += 601.0
    await checked.settle()
    await asyncio.sleep(0)
    assert await checked.settle() == []
    assert checked.hub.asked == 2
    assert checked.condition("Ready") == "False InsufficientGPUMemory"


@pytest.mark.parametrize("error", [Forbidden("nodes is forbidden"), Unavailable("no answer")])
async def test_nodes_that_may_not_be_listed_are_unknown(checked: Any, error: Exception) -> None:
    checked.cluster.errors["nodes"] = [error]
    checked.apply(model=MODEL, resources=GPU)
    assert "create Deployment chat" in await checked.settle()
    await checked.settle()
    assert (checked.cluster.read.count(Ref("Node", "")), checked.hub.asked) == (1, 0)


async def test_number_of_cached_models_is_bounded(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_MOST_MODELS", 2)
    for name in "abc":
        checked.apply(model={"source": f"hf://org/{name}"}, resources=GPU)
        await checked.settle()
    assert [source.repository for source in checked.check._known] == ["org/b", "org/c"]


async def test_concurrent_hub_lookups_are_limited(checked: Any) -> None:
    checked.hub.open.clear()
    for number in range(20):
        await checked.check._facts(HubSource(repository=f"org/m{number}", revision="main"), None, 0.0)
    await asyncio.sleep(0)
    assert checked.hub.asked == 8
    checked.hub.open.set()
    while checked.hub.asked < 20:
        await asyncio.sleep(0)
