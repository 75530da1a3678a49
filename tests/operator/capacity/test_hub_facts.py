"""The operator reads the same facts about a hub's model as ``quire plan``, and no hub can harm it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fetch_support.hub_stub import COMMIT, HubStub, safetensors, serving

from quire_cli.local.model_store import ModelStore
from quire_operator.api import HubSource
from quire_operator.capacity import hub as hub_module
from quire_operator.capacity.hub import HubFacts, ModelUnknown

CONFIG = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
SOURCE = HubSource(repository="org/tiny", revision="main")
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}


def large_header() -> bytes:
    """Return a header that is larger than the first read."""
    tensors = {f"layer.{n}.weight": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in range(3000)}
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + b"xx"


FILES: dict[str, dict[str, bytes]] = {
    "one file": {"model.safetensors": safetensors(5000)},
    "a large header": {"model.safetensors": large_header()},
    "many files": {
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model-1.safetensors": safetensors(3000),
        "model-2.safetensors": safetensors(400),
        "extra.safetensors": safetensors(7),
    },
    "many files without an index": {
        "a.safetensors": safetensors(3000),
        "b.safetensors": safetensors(400),
        "consolidated.safetensors": safetensors(3400),
    },
}


@pytest.fixture
def hub() -> Iterator[HubStub]:
    yield HubStub(repository="org/tiny", files={"config.json": json.dumps(CONFIG).encode(), **FILES["one file"]})


@pytest.fixture
def address(hub: HubStub) -> Iterator[str]:
    with serving(hub) as url:
        yield url


@pytest.fixture
async def facts(address: str) -> AsyncIterator[HubFacts]:
    reader = HubFacts(address)
    yield reader
    await reader.aclose()


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
async def test_hub_facts_equal_those_of_quire_plan(
    hub: HubStub,
    address: str,
    facts: HubFacts,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.files = {"config.json": json.dumps(CONFIG).encode(), **files}
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_operators_own")
    found = await facts.facts(SOURCE)
    assert set(hub.tokens) == {None}
    assert hub.served and all(wanted for name, wanted in hub.served if name.endswith(".safetensors"))

    monkeypatch.setenv("HF_ENDPOINT", address)
    store = ModelStore(base=tmp_path, cache=tmp_path)
    assert await asyncio.to_thread(store.facts, SOURCE) == found


async def unknown(reader: HubFacts, source: HubSource = SOURCE) -> ModelUnknown:
    with pytest.raises(ModelUnknown) as caught:
        await reader.facts(source)
    return caught.value


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"{}", "model.safetensors": safetensors(1)},
        {"config.json": b"[" * 100_000, "model.safetensors": safetensors(1)},
        {"config.json": b"\xff\x00", "model.safetensors": safetensors(1)},
        {"model.safetensors": safetensors(1)},
        {"config.json": json.dumps(CONFIG).encode()},
        {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"\xff" * 100},
        {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": safetensors(100)[:-1]},
        {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": b'{"weight_map": 1}'},
        {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": b'{"weight_map": {"a": "no"}}'},
        {"config.json": json.dumps(CONFIG).encode() + b" " * (9 << 20), "model.safetensors": safetensors(1)},
    ],
)
async def test_repository_without_a_model_is_unknown(hub: HubStub, facts: HubFacts, files: dict[str, bytes]) -> None:
    hub.files = files
    assert not (await unknown(facts)).unreachable


async def test_missing_and_gated_repositories_are_unknown(hub: HubStub, facts: HubFacts) -> None:
    assert not (await unknown(facts, HubSource(repository="org/none", revision="main"))).unreachable
    assert not (await unknown(facts, HubSource(repository="org/tiny", revision="../../x"))).unreachable
    hub.forbidden = True
    assert not (await unknown(facts)).unreachable


async def test_failing_or_silent_hub_is_unreachable(
    hub: HubStub, facts: HubFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stumbles["config.json"] = 1
    assert (await unknown(facts)).unreachable
    away = HubFacts("http://127.0.0.1:9")
    assert (await unknown(away)).unreachable
    await away.aclose()
    monkeypatch.setattr(hub_module, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reader: Any = HubFacts(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert (await unknown(reader)).unreachable
        await reader.aclose()


async def test_a_branch_is_resolved_to_its_commit(hub: HubStub, facts: HubFacts) -> None:
    assert await facts.commit(SOURCE) == COMMIT
    assert set(hub.tokens) == {None}
    with pytest.raises(ModelUnknown):
        await facts.commit(HubSource(repository="org/none", revision="main"))
    hub.forbidden = True
    assert await facts.commit(SOURCE) == COMMIT, "a gated model keeps its files for itself, not its commits"
