"""hf://: a model of a hub on loopback, resumed after an interruption; messages for errors of the hub."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fetch_support.hub_stub import HubStub
from fetch_support.model import CONFIG, ELEMENTS

from quire_common.model_source import HubSource
from quire_engine.errors import FetchError
from quire_engine.fetch.hub import HubOrigin

Fetch = Callable[..., Awaitable[Path]]
TINY = "hf://org/tiny"


async def test_download_resumes_where_its_connection_broke(hub: HubStub, fetch: Fetch, model: dict[str, bytes]) -> None:
    hub.cut["model.safetensors"] = 2_000_000
    folder = await fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]
    first, second = hub.ranges("model.safetensors")
    assert first == "" and 0 < resumed_at(second) <= 2_000_000


def resumed_at(wanted: str) -> int:
    return int(wanted.removeprefix("bytes=").removesuffix("-"))


async def test_damaged_file_is_refused_and_fetched_again(hub: HubStub, fetch: Fetch, model: dict[str, bytes]) -> None:
    hub.damaged.add("model.safetensors")
    with pytest.raises(FetchError, match="model.safetensors of org/tiny arrived damaged: its SHA-256"):
        await fetch(TINY)
    hub.damaged.clear()
    folder = await fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_plan_downloads_no_weights(hub: HubStub) -> None:
    found = HubOrigin(HubSource(repository="org/tiny", revision="main")).describe()
    assert (found.parameters, found.config) == (ELEMENTS, CONFIG)
    assert hub.ranges("model.safetensors") == ["bytes=0-100000"]


async def test_transient_hub_error_is_retried(hub: HubStub, fetch: Fetch) -> None:
    hub.stumbles["tokenizer.json"] = 1
    folder = await fetch(TINY)
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://org/tyni", "has no model org/tyni, or it is private"),
        ("hf://org/tiny@v9", "org/tiny has no revision v9"),
    ],
)
async def test_a_wrong_repository_or_revision_is_named(hub: HubStub, fetch: Fetch, source: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        await fetch(source)


async def test_gated_model_error_names_the_token_variable(hub: HubStub, fetch: Fetch) -> None:
    hub.forbidden = True
    with pytest.raises(FetchError, match="org/tiny is gated") as caught:
        await fetch(TINY)
    assert caught.value.hint is not None and "HF_TOKEN" in caught.value.hint


async def test_repository_without_safetensors_is_refused_first(hub: HubStub, fetch: Fetch) -> None:
    hub.files = {name: data for name, data in hub.files.items() if name != "model.safetensors"}
    with pytest.raises(FetchError, match="has no safetensors weights"):
        await fetch(TINY)
    assert hub.served == []


async def test_unreachable_hub_error_names_the_endpoint_variable(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match="cannot be reached for org/tiny") as caught:
        await fetch(TINY)
    assert caught.value.hint is not None and "HF_ENDPOINT" in caught.value.hint
