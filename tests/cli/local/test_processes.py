"""Replicas as processes: their number, victims, the gateway's endpoints, and the autoscaler's observations."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from quire_local.harness import FAKE_ENGINE, HURRY, Watch

from quire_cli.local.deployment import LocalDeployment
from quire_cli.local.process import Phase
from quire_cli.local.replicas import LocalCluster
from quire_operator.autoscaling.observation import ReplicaPhase


class Cluster:
    """A local cluster of fake engines, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.watch = Watch()
        self.file = folder / "endpoints.json"
        self.troubles: list[str] = []
        self.local = LocalCluster(
            endpoints_file=self.file,
            logs=folder,
            pace=HURRY,
            changed=self.watch,
            troubled=self._troubled,
        )

    def _troubled(self, message: str) -> None:
        self.troubles.append(message)
        self.watch()

    def add(self, name: str = "chat", *, replicas: int = 1, gpus: tuple[int, ...] = ()) -> None:
        deployment = LocalDeployment(
            name=name,
            served_name=f"served-{name}",
            command=lambda port: [*FAKE_ENGINE, "--port", str(port)],
            kill_grace_seconds=5.0,
            gpus=gpus,
        )
        self.local.add(deployment, replicas=replicas)

    def phases(self, name: str = "chat") -> dict[str, Phase]:
        return {status.name: status.phase for status in self.local.statuses(name)}

    async def until(self, *ready: str, name: str = "chat") -> None:
        """Wait until exactly these replicas exist and are ready."""
        await self.watch.until(lambda: self.phases(name) == dict.fromkeys(ready, Phase.READY))

    def endpoints(self, name: str = "chat") -> dict[str, dict[str, object]]:
        models = {model["name"]: model["endpoints"] for model in json.loads(self.file.read_text())["models"]}
        return {endpoint["id"]: endpoint for endpoint in models[f"served-{name}"]}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    await cluster.local.kill()


async def test_replicas_are_numbered_and_announced_when_ready(cluster: Cluster) -> None:
    cluster.add(replicas=2)
    cluster.add("code", replicas=0)
    assert cluster.endpoints() == {}
    await cluster.until("chat-0", "chat-1")
    told = cluster.endpoints()
    assert {name: (e["ready"], e["serving"], e["terminating"]) for name, e in told.items()} == {
        "chat-0": (True, True, False),
        "chat-1": (True, True, False),
    }
    assert told["chat-0"]["url"] != told["chat-1"]["url"]
    assert cluster.endpoints("code") == {}


async def test_scale_down_removes_victims_first_and_reuses_numbers(cluster: Cluster) -> None:
    cluster.add(replicas=3)
    await cluster.until("chat-0", "chat-1", "chat-2")
    cluster.local.scale("chat", replicas=1, victims=["chat-1", "chat-0"])
    assert cluster.local.target("chat") == 1
    await cluster.until("chat-2")
    cluster.local.scale("chat", replicas=2)
    await cluster.until("chat-0", "chat-2")


async def test_loading_then_youngest_replicas_are_removed_first(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(replicas=2)
    await cluster.until("chat-0", "chat-1")
    monkeypatch.setenv("FAKE_LOAD_SECONDS", "600")
    cluster.local.scale("chat", replicas=3)
    await cluster.watch.until(lambda: cluster.phases().get("chat-2") is Phase.LOADING)
    assert [e["starting"] for _, e in sorted(cluster.endpoints().items())] == [False, False, True]
    cluster.local.scale("chat", replicas=2)
    await cluster.until("chat-0", "chat-1")
    cluster.local.scale("chat", replicas=1)
    await cluster.until("chat-0")


async def test_draining_replica_serves_but_gets_no_new_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DRAIN_SECONDS", "0.3")
    cluster.add(replicas=2)
    await cluster.until("chat-0", "chat-1")
    cluster.local.scale("chat", replicas=1)
    leaving = cluster.endpoints()["chat-1"]
    assert (leaving["ready"], leaving["serving"], leaving["terminating"]) == (False, True, True)
    await cluster.watch.until(lambda: cluster.phases()["chat-1"] is Phase.DRAINING)
    assert {a.name: a.phase for a in cluster.local.addresses("chat")}["chat-1"] is ReplicaPhase.DRAINING
    await cluster.until("chat-0")
    assert list(cluster.endpoints()) == ["chat-0"]


async def test_a_crashed_replica_leaves_the_list_and_counts_as_pending(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXIT", "1")
    cluster.add()
    await cluster.watch.until(lambda: cluster.phases()["chat-0"] is Phase.FAILED)
    assert cluster.endpoints() == {}
    assert [address.phase for address in cluster.local.addresses("chat")] == [ReplicaPhase.PENDING]
    assert cluster.local.target("chat") == 1


async def test_each_replica_sees_its_own_gpu_or_none(cluster: Cluster, tmp_path: Path) -> None:
    for name, gpus, expected in (("gpu", (3, 4), ["3", "4"]), ("again", (5,), ["5", "5"]), ("cpu", (), ["", ""])):
        cluster.add(name, replicas=2, gpus=gpus)
        await cluster.until(f"{name}-0", f"{name}-1", name=name)
        pids = [status.pid for status in cluster.local.statuses(name)]
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        seen = [e.decode().partition("=")[2] for env in environments for e in env if e.startswith(b"CUDA_VISIBLE")]
        assert seen == expected


async def test_scale_up_during_a_drain_uses_the_gpu_that_becomes_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DRAIN_SECONDS", "0.5")
    cluster.add(replicas=2, gpus=(0, 1))
    await cluster.until("chat-0", "chat-1")
    cluster.local.scale("chat", replicas=1)
    cluster.local.scale("chat", replicas=2)
    # The number 2 would share GPU 0.
    await cluster.until("chat-0", "chat-3")


async def test_internal_error_is_raised(cluster: Cluster) -> None:
    def broken(port: int) -> list[str]:
        raise ZeroDivisionError(port)

    deployment = LocalDeployment(name="chat", served_name="chat", command=broken, kill_grace_seconds=1.0)
    cluster.local.add(deployment, replicas=1)
    with pytest.raises(ZeroDivisionError):
        await cluster.local.until_broken()
    assert cluster.local.statuses("chat") == ()


async def test_unwritable_list_is_reported_and_written_later(cluster: Cluster) -> None:
    in_the_way = cluster.file.with_name(".endpoints.json.new")
    in_the_way.mkdir()
    cluster.add()
    await cluster.until("chat-0")
    assert [trouble.partition(";")[0] for trouble in cluster.troubles] == [
        f"{cluster.file} cannot be written: Is a directory"
    ]
    assert json.loads(cluster.file.read_text()) == {"models": []}
    in_the_way.rmdir()
    await cluster.watch.until(lambda: len(cluster.troubles) == 2)
    assert cluster.troubles[1] == f"{cluster.file} can be written again"
    assert cluster.endpoints()["chat-0"]["ready"]
