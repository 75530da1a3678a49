"""Sources of models: existing folders, and a hub on loopback with one download that resumes after an interruption."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fetch_support.hub_stub import HubStub, safetensors, serving

from quire_cli.errors import ModelProblem
from quire_cli.local.model_store import ModelStore, folder_facts
from quire_common.model_source import cache_home
from quire_operator.api import BucketSource, ClaimSource, FileSource, HubSource, ImageSource

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
    return ModelStore(base=tmp_path, cache=tmp_path / "cache")


class Bar:
    """A progress bar that records its updates and signals the first."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.moved = asyncio.Event()

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.moved.set()


async def test_hub_download_reports_progress_and_omits_code(hub: HubStub, store: ModelStore) -> None:
    bar = Bar()
    folder = await store.fetch(TINY, progress=bar)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    done, total = bar.told[-1]
    assert done == total > len(WEIGHTS)
    assert all(before <= after for (before, _), (after, _) in zip(bar.told, bar.told[1:], strict=False))
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert folder_facts(folder).parameters == ELEMENTS


async def test_present_files_are_not_downloaded_again(
    hub: HubStub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await store.fetch(TINY, progress=Bar())
    hub.served.clear()
    assert await store.fetch(TINY, progress=Bar()) == folder
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert await store.fetch(TINY, progress=Bar()) == folder
    assert store.facts(TINY).parameters == ELEMENTS
    assert hub.served == []


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
    (wanted,) = hub.ranges("model.safetensors")
    assert int(wanted.removeprefix("bytes=").removesuffix("-")) > 1_500_000
    assert again.told[0][0] > 1_500_000


def test_plan_needs_only_the_configuration_and_the_header(hub: HubStub, store: ModelStore) -> None:
    facts = store.facts(TINY)
    assert (facts.parameters, facts.counted, facts.config.kv_heads) == (ELEMENTS, True, 2)
    assert hub.ranges("model.safetensors") == ["bytes=0-131071"]
    assert set(hub.tokens) == {"Bearer hf_secret"}


async def test_fetcher_errors_are_raised(hub: HubStub, store: ModelStore) -> None:
    hub.forbidden = True
    with pytest.raises(ModelProblem, match="org/tiny is gated") as caught:
        await store.fetch(TINY, progress=Bar())
    assert caught.value.hint is not None and "HF_TOKEN" in caught.value.hint


@pytest.mark.parametrize("source", [HubSource(repository="org/tyni", revision="main"), replace(TINY, revision="v9")])
def test_plan_names_a_model_that_the_hub_does_not_have(hub: HubStub, store: ModelStore, source: HubSource) -> None:
    with pytest.raises(ModelProblem, match=str(source)) as caught:
        store.facts(source)
    assert caught.value.hint is not None and "HF_TOKEN" in caught.value.hint


def test_plan_reads_a_bucket_through_the_fetcher(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"config": CONFIG, "parameters": 7})
    program = tmp_path / "quire-fetch"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 's3://models/m --describe' ] && echo '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setattr("quire_cli.local.model_store.installed", lambda name: str(program))
    facts = store.facts(BucketSource(bucket="models", prefix="m"))
    assert (facts.parameters, facts.counted, facts.config.kv_heads) == (7, True, 2)
    program.write_text("#!/bin/sh\necho no memory >&2; exit 9\n")
    with pytest.raises(ModelProblem, match="ended with code 9") as caught:
        store.facts(BucketSource(bucket="models", prefix="m"))
    assert caught.value.details == ("no memory",)


def test_the_cache_can_be_chosen() -> None:
    assert cache_home({"QUIRE_CACHE": "/a"}) == Path("/a/models")
    assert cache_home({"XDG_CACHE_HOME": "/c"}) == Path("/c/quire/models")


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


async def test_relative_folders_are_relative_to_the_file(store: ModelStore, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "m")
    assert await store.fetch(FileSource(path="models/m", relative=True), progress=Bar()) == folder
    assert await store.fetch(FileSource(path=str(folder), relative=False), progress=Bar()) == folder


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "contains no config.json"),
        (write("config.json", b"{"), "cannot be read as JSON"),
        (write("config.json", b"[" * 100_000), "cannot be read as JSON"),
        (write("config.json", b"\xff\xfe"), "cannot be read as JSON"),
        (write("config.json", b"[]"), "expected a JSON object"),
        (write("config.json", b'{"model_type": "gpt2"}'), "quire cannot compute the memory of the model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "contains no \\*.safetensors weights"),
        (write("model.safetensors", WEIGHTS[:-10]), "its last 10 bytes are missing"),
        (write("model.safetensors", b"<html>not found</html>"), "is not a complete safetensors file"),
        (write("model.safetensors", b""), "is not a complete safetensors file"),
        (write("model.safetensors", (5).to_bytes(8, "little") + b'{"w":'), "is not a complete safetensors file"),
        (write("model.safetensors", (9).to_bytes(8, "little") + b'{"w": [] }'), "is not a complete safetensors file"),
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


async def test_missing_folder_is_named_with_its_full_path(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match=f"{tmp_path}/nowhere does not exist"):
        await store.fetch(FileSource(path="nowhere", relative=True), progress=Bar())
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelProblem, match="is a file, not a folder"):
        await store.fetch(FileSource(path="file", relative=True), progress=Bar())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (ClaimSource(claim_name="models", path=""), "is a volume of a cluster"),
        (
            ImageSource(registry="reg.example", repository="m", tag="1", digest=None),
            "spec.model.source: oci://reg.example/m:1 is an image, which only the kubelet of a cluster mounts",
        ),
    ],
)
async def test_volume_of_a_cluster_is_refused_locally(
    store: ModelStore, source: ClaimSource | ImageSource, says: str
) -> None:
    with pytest.raises(ModelProblem, match=says):
        await store.fetch(source, progress=Bar())
    with pytest.raises(ModelProblem, match=says):
        store.facts(source)
