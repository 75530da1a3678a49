"""Where models come from: folders as they stand, and a hub on loopback, downloaded once, resumed after a cut."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire_local.hub_stub import HubStub, safetensors, serving

from quire_cli.local.model_store import ModelStore, cache_home, folder_facts
from quire_operator.domain.resource import ClaimSource, FileSource, HubSource
from quire_operator.errors import ModelProblem

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
ELEMENTS = 3_000_000
WEIGHTS = safetensors(ELEMENTS)
TINY = HubSource(repository="org/tiny", revision="main")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": b"code",
    }
    stub = HubStub(repository="org/tiny", files=files)
    with serving(stub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield stub


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(beside=tmp_path, cache=tmp_path / "cache")


class Bar:
    """Keeps the progress it is told, and says when there was some."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.moved = asyncio.Event()

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.moved.set()


async def test_a_hub_model_is_downloaded_with_progress_and_without_pickles_or_code(
    hub: HubStub, store: ModelStore
) -> None:
    bar = Bar()
    folder = await store.fetch(TINY, progress=bar)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    done, total = bar.told[-1]
    assert done == total > len(WEIGHTS)
    assert all(before <= after for (before, _), (after, _) in zip(bar.told, bar.told[1:], strict=False))
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert folder_facts(folder).parameters == ELEMENTS


async def test_what_is_here_is_not_downloaded_again_and_needs_no_network(
    hub: HubStub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await store.fetch(TINY, progress=Bar())
    hub.served.clear()
    assert await store.fetch(TINY, progress=Bar()) == folder
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert await store.fetch(TINY, progress=Bar()) == folder
    assert store.facts(TINY).parameters == ELEMENTS
    assert hub.served == []


async def test_a_connection_cut_in_the_middle_of_a_file_is_taken_up_where_it_broke(
    hub: HubStub, store: ModelStore
) -> None:
    hub.cut["model.safetensors"] = 2_500_000
    folder = await store.fetch(TINY, progress=Bar())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.ranges("model.safetensors")
    assert first == "" and 0 < resumed_at(second) <= 2_500_000


async def test_a_stopped_download_is_continued_by_the_next_one(hub: HubStub, store: ModelStore) -> None:
    hub.stall_after["model.safetensors"] = 2_500_000
    bar = Bar()
    download = asyncio.create_task(store.fetch(TINY, progress=bar))
    while not any(done >= 2_000_000 for done, _ in bar.told):
        bar.moved.clear()
        await asyncio.wait_for(bar.moved.wait(), 60)
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    hub.served.clear()
    again = Bar()
    folder = await store.fetch(TINY, progress=again)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert resumed_at(*hub.ranges("model.safetensors")) > 1_500_000
    assert again.told[0][0] > 1_500_000


def resumed_at(wanted: str) -> int:
    return int(wanted.removeprefix("bytes=").removesuffix("-"))


async def test_a_damaged_file_is_refused_and_fetched_anew_by_the_next_try(hub: HubStub, store: ModelStore) -> None:
    hub.damaged.add("model.safetensors")
    with pytest.raises(ModelProblem, match="model.safetensors of org/tiny came damaged: its SHA-256"):
        await store.fetch(TINY, progress=Bar())
    hub.damaged.clear()
    folder = await store.fetch(TINY, progress=Bar())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


async def test_a_hub_that_stumbles_is_asked_again(hub: HubStub, store: ModelStore) -> None:
    hub.stumbles["tokenizer.json"] = 1
    folder = await store.fetch(TINY, progress=Bar())
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


def test_plan_needs_only_the_configuration_and_the_header(hub: HubStub, store: ModelStore) -> None:
    facts = store.facts(TINY)
    assert (facts.parameters, facts.counted, facts.config.kv_heads) == (ELEMENTS, True, 2)
    assert hub.ranges("model.safetensors") == ["bytes=0-100000"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (HubSource(repository="org/tyni", revision="main"), "has no model org/tyni, or it is private"),
        (HubSource(repository="org/tiny", revision="v9"), "org/tiny has no revision v9"),
    ],
)
async def test_a_wrong_repository_or_revision_is_named(
    hub: HubStub, store: ModelStore, source: HubSource, message: str
) -> None:
    with pytest.raises(ModelProblem, match=message):
        await store.fetch(source, progress=Bar())
    with pytest.raises(ModelProblem, match=message):
        store.facts(source)


async def test_a_gated_model_says_how_to_get_in(hub: HubStub, store: ModelStore) -> None:
    hub.forbidden = True
    with pytest.raises(ModelProblem, match="org/tiny is gated") as caught:
        await store.fetch(TINY, progress=Bar())
    assert caught.value.hint is not None and "HF_TOKEN" in caught.value.hint


async def test_a_repository_without_safetensors_is_refused_before_any_download(hub: HubStub, store: ModelStore) -> None:
    hub.files = {name: data for name, data in hub.files.items() if name != "model.safetensors"}
    with pytest.raises(ModelProblem, match="has no safetensors weights"):
        await store.fetch(TINY, progress=Bar())
    assert hub.served == []


async def test_no_way_to_the_hub_is_said_with_what_to_check(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelProblem, match="can't be reached for org/tiny") as caught:
        await store.fetch(TINY, progress=Bar())
    assert caught.value.hint is not None and "HF_ENDPOINT" in caught.value.hint


def test_the_cache_can_be_chosen() -> None:
    assert cache_home({"QUIRE_CACHE": "/a"}) == Path("/a/models")
    assert cache_home({"XDG_CACHE_HOME": "/c"}) == Path("/c/quire/models")


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


async def test_relative_folders_start_beside_the_file(store: ModelStore, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "m")
    assert await store.fetch(FileSource(path="models/m", relative=True), progress=Bar()) == folder
    assert await store.fetch(FileSource(path=str(folder), relative=False), progress=Bar()) == folder


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (write("config.json", b"{"), "can't be read as JSON"),
        (write("config.json", b"[" * 100_000), "can't be read as JSON"),
        (write("config.json", b"\xff\xfe"), "can't be read as JSON"),
        (write("config.json", b"[]"), "a mapping is needed"),
        (write("config.json", b'{"model_type": "gpt2"}'), "does not describe a model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no \\*.safetensors weights"),
        (write("model.safetensors", WEIGHTS[:-10]), "its last 10 bytes are missing"),
        (write("model.safetensors", b"<html>not found</html>"), "is no whole safetensors file"),
        (write("model.safetensors", b""), "is no whole safetensors file"),
        (write("model.safetensors", (5).to_bytes(8, "little") + b'{"w":'), "is no whole safetensors file"),
        (write("model.safetensors", (9).to_bytes(8, "little") + b'{"w": [] }'), "is no whole safetensors file"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file_named(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = model_folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(ModelProblem, match=message) as caught:
        folder_facts(folder)
    assert str(folder) in caught.value.message


async def test_a_folder_that_is_not_there_is_named_whole(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match=f"{tmp_path}/nowhere does not exist"):
        await store.fetch(FileSource(path="nowhere", relative=True), progress=Bar())
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelProblem, match="is a file, not a folder"):
        await store.fetch(FileSource(path="file", relative=True), progress=Bar())


async def test_a_volume_of_a_cluster_has_no_meaning_here(store: ModelStore) -> None:
    with pytest.raises(ModelProblem, match="is a volume of a cluster"):
        await store.fetch(ClaimSource(claim_name="models", path=""), progress=Bar())
