"""Progress of downloads: from the pods that run them, into the status, and gone when it is no longer true."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_operator.deployment.downloads import Downloads
from quire_operator.kube.objects import ContainerState, Key, Pod

KEY = Key("prod", "chat")
FETCHING = ContainerState(name="fetch-model", init=True, ready=False, restarts=0, running=True)
MadePod = Callable[..., Pod]


class Replicas:
    """``Pages`` in memory."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []

    async def answer(self, url: str) -> bytes | None:
        self.asked.append(url)
        return self.pages.get(url)

    def arrived(self, ip: str, done: object, total: object = 1000) -> None:
        self.pages[f"http://{ip}:8000/progress"] = json.dumps({"done": done, "total": total}).encode()


@pytest.fixture
def fetching(world: Any, pod: MadePod) -> Any:
    """Return a world with a replica that downloads its model."""
    world.replicas = Replicas()
    world.downloads = Downloads(world.view, world.replicas)
    world.start(download=world.downloads.progress)
    world.apply(model={"source": "s3://bucket/m"})
    world.cluster.pods = {"a": pod("a", ready=False, phase="Pending", ip="10.0.0.1", containers=(FETCHING,))}
    return world


async def polled(world: Any, *, after: float = 15.0) -> Any:
    """Return the status of the download after a poll."""
    world.clock.time += after
    world.enqueued.clear()
    await world.downloads.poll()
    if KEY in world.enqueued:
        await world.settle(1)
    return world.status.get("model", {}).get("download")


async def test_progress_is_in_status_and_conditions(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 100)
    assert (await polled(fetching))["downloadedBytes"] == 100
    fetching.replicas.arrived("10.0.0.1", 250)
    found = await polled(fetching)
    assert (found["bytesPerSecond"], found["secondsLeft"], found["totalBytes"]) == (10, 75, 1000)
    for kind in ("Ready", "Progressing", "ModelLoaded"):
        assert "250 B of 1000 B (25 %), 10 B/s, 1m15s left" in fetching.message(kind)
    assert fetching.condition("Ready") == "False Starting"


async def test_poll_without_progress_writes_nothing(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 100)
    await polled(fetching)
    assert await polled(fetching) is not None  # the rate becomes known
    for _ in range(3):
        await polled(fetching)
        assert fetching.enqueued == []


def finish(world: Any) -> None:
    found = world.cluster.pods["a"]
    ready = replace(FETCHING, running=False, ready=True)
    world.cluster.pods["a"] = replace(found, version=world.cluster._next(), containers=(ready,))
    world.show()


async def test_progress_is_removed_after_the_download(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 990)
    assert await polled(fetching)
    finish(fetching)
    assert await polled(fetching) is None
    assert "downloading" not in fetching.message("Ready")


async def test_progress_is_removed_if_a_pod_stops_answering(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 500)
    assert await polled(fetching)
    fetching.replicas.pages.clear()
    assert await polled(fetching), "one lost answer is no news"
    assert await polled(fetching, after=200.0) is None


async def test_progress_of_a_deleted_llmdeployment_is_dropped(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 500)
    assert await polled(fetching)
    fetching.delete()
    await fetching.downloads.poll()
    assert fetching.downloads.progress(KEY) is None


async def test_an_invalid_spec_keeps_no_old_progress(fetching: Any) -> None:
    await fetching.settle()
    fetching.replicas.arrived("10.0.0.1", 500)
    assert await polled(fetching)
    finish(fetching)
    fetching.apply(model={})
    assert await polled(fetching) is None
    assert fetching.condition("Ready") == "False InvalidSpec"


@pytest.mark.parametrize(
    "page",
    [b"", b"{", b"[]", b"{}", b'{"done": -1, "total": 5}', b'{"done": 6, "total": 5}', b'{"done": true, "total": 5}']
    + [b'{"done": 0, "total": 0}', b'{"done": 1, "total": 1e300}', b'{"done": 1.5, "total": 2}', b"[" * 100_000],
    ids=repr,
)
async def test_response_without_progress_is_ignored(fetching: Any, page: bytes) -> None:
    await fetching.settle()
    fetching.replicas.pages["http://10.0.0.1:8000/progress"] = page
    assert await polled(fetching) is None


@pytest.mark.parametrize(
    "changes", [{"ip": ""}, {"deleting": True}, {"containers": (replace(FETCHING, running=False),)}, {"containers": ()}]
)
async def test_only_downloading_pods_are_polled(fetching: Any, changes: dict[str, Any]) -> None:
    await fetching.settle()
    fetching.cluster.pods["a"] = replace(fetching.cluster.pods["a"], version="9", **changes)
    fetching.show()
    await polled(fetching)
    assert fetching.replicas.asked == []


async def test_an_ipv6_address_is_in_brackets(fetching: Any) -> None:
    fetching.cluster.pods["a"] = replace(fetching.cluster.pods["a"], version="9", ip="fd00::1")
    await fetching.settle()
    await polled(fetching)
    assert fetching.replicas.asked == ["http://[fd00::1]:8000/progress"]
