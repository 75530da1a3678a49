"""One reader of the hub: whatever finds it silent, nothing asks it again for a while."""

import asyncio

import pytest

from quire_common.model_memory import ModelFacts
from quire_common.model_source import HubSource, parse_source
from quire_operator.capacity import hub as hub_module
from quire_operator.capacity.hub import HubReader, ModelUnknown

COMMIT = "1" * 40


class Hub:
    """``HubFacts`` with chosen answers."""

    def __init__(self) -> None:
        self.answer: str | ModelUnknown | None = COMMIT
        self.asked: list[str] = []

    async def facts(self, source: HubSource) -> ModelFacts:
        self.asked.append("facts")
        if isinstance(self.answer, ModelUnknown):
            raise self.answer
        return await asyncio.Future()

    async def commit(self, source: HubSource) -> str:
        self.asked.append("commit")
        if isinstance(self.answer, ModelUnknown):
            raise self.answer
        return self.answer or await asyncio.Future()

    async def aclose(self) -> None: ...


def source() -> HubSource:
    found = parse_source("hf://org/m@main")
    assert isinstance(found, HubSource)
    return found


@pytest.mark.parametrize("first", ["facts", "commit"])
async def test_unreachable_hub_pauses_both_kinds_of_request(first: str) -> None:
    hub, time = Hub(), [100.0]
    reader = HubReader(hub, now=lambda: time[0])
    hub.answer = ModelUnknown("no route", unreachable=True)
    assert await (reader.facts(source()) if first == "facts" else reader.commit(source())) is None
    assert reader.is_paused
    assert (await reader.facts(source()), await reader.commit(source())) == (None, None)
    assert hub.asked == [first]

    hub.answer, time[0] = COMMIT, 160.0
    assert await reader.commit(source()) == COMMIT and not reader.is_paused


async def test_hanging_hub_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_COMMIT_SECONDS", 0.01)
    hub = Hub()
    hub.answer = None
    reader = HubReader(hub, now=lambda: 0.0)
    assert await reader.commit(source()) is None and reader.is_paused


async def test_one_unknown_model_pauses_nothing() -> None:
    hub = Hub()
    reader = HubReader(hub, now=lambda: 0.0)
    hub.answer = ModelUnknown("private")
    assert await reader.facts(source()) is None and not reader.is_paused
    hub.answer = COMMIT
    assert await reader.commit(source()) == COMMIT
