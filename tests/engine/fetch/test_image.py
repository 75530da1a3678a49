"""oci://: layers of images and artifacts become a folder; digests, logins, interruptions and path traversal."""

import json
import tarfile
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fetch_support.faulty_proxy import Canned
from fetch_support.model import CONFIG, ELEMENTS
from fetch_support.registry import INDEX, MANIFEST, Layer, RegistryClient, archive, link, titled

from quire_common.model_source import ImageSource
from quire_engine.errors import FetchError
from quire_engine.fetch import image, image_layers
from quire_engine.fetch.image import ImageOrigin

Fetch = Callable[..., Awaitable[Path]]
ATTESTATION = {"vnd.docker.reference.type": "attestation-manifest"}


def under(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
async def test_a_folder_of_an_image_becomes_the_model(
    compression: str, registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    base = archive({"etc/passwd": b"root"}, members=[link("etc/mtab", "/proc/mounts")])
    registry.push("org/m", f"v{compression}", base, archive(under("models/m", model), compression=compression))
    source = f"oci://{registry.host}/org/m:v{compression}"
    folder = await fetch(f"{source}/models/m")
    assert held(folder) == model and folder.parts[-2:] == ("models", "m")
    assert not (folder.parents[1] / "etc").exists(), "nothing else is unpacked"
    assert [path.suffix for path in (folder.parents[1] / ".layers").iterdir()] == [".applied"] * 2
    registry.proxy.seen.clear()
    assert await fetch(f"{source}/models/m") == folder
    assert not [path for _, path, _ in registry.proxy.seen if "/blobs/" in path]


async def test_artifact_of_single_files_is_downloaded_unchanged(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    extra = [titled("README.md", b"words"), titled("run.py", b"code"), titled("special_tokens_map.json", b"{}")]
    registry.push("org/artifact", "1", *(titled(name, data) for name, data in model.items()), *extra)
    folder = await fetch(f"oci://{registry.host}/org/artifact:1")
    assert held(folder) == {**model, "special_tokens_map.json": b"{}"}, "tokenizer.json has the same content"


async def test_model_pack_is_recognized_by_its_annotations(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    layers = [
        Layer(
            data=data,
            media_type=f"application/vnd.cncf.model.weight{'' if name.endswith('safetensors') else '.config'}.v1.raw",
            annotations={"org.cncf.model.filepath": name},
        )
        for name, data in model.items()
    ]
    registry.push("org/pack", "1", *layers)
    assert held(await fetch(f"oci://{registry.host}/org/pack:1")) == model


async def test_later_layers_replace_and_remove_earlier_files(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    registry.push(
        "org/layers",
        "1",
        archive({**under("m", model), "m/old.json": b"old", "m/sub/a": b"a", "m/sub/b": b"b", "m/dir/x": b"x"}),
        archive({"m/.wh.old.json": b"", "m/sub/.wh..wh..opq": b"", "m/sub/c": b"c", "m/tokenizer.json": b'{"new": 1}'}),
        archive({"m/dir": b"a file now"}),
    )
    folder = await fetch(f"oci://{registry.host}/org/layers:1/m")
    assert held(folder) == {**model, "tokenizer.json": b'{"new": 1}', "dir": b"a file now"}
    assert [path.name for path in (folder / "sub").iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("members", "files", "says"),
    [
        ([], {"m/../../out.json": b"out"}, "outside the model's folder"),
        ([], {".layers/0.applied": b""}, "outside the model's folder"),
        ([link("m/config.json", "/etc/passwd")], {}, "to /etc/passwd, which is outside the model's folder"),
        ([link("m/config.json", "../other/config.json")], {}, "outside the model's folder"),
        ([link("m/config.json", "etc/shadow", hard=True)], {}, "outside the model's folder"),
        ([link("m/d", "sub")], {"m/d/config.json": b"{}"}, "below a link"),
    ],
)
async def test_paths_outside_the_folder_are_rejected(
    members: list[tarfile.TarInfo],
    files: dict[str, bytes],
    says: str,
    registry: RegistryClient,
    fetch: Fetch,
    tmp_path: Path,
) -> None:
    registry.push(
        "org/evil", "1", archive({"m/model.safetensors": b"", "m/sub/x": b""}), archive(files, members=members)
    )
    with pytest.raises(FetchError, match=says):
        await fetch(f"oci://{registry.host}/org/evil:1/m")
    assert not list(tmp_path.rglob("out.json"))


async def test_links_within_the_folder_are_kept(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    files = {"m/blobs/1": model["model.safetensors"], "m/config.json": model["config.json"]}
    layer = archive(files, members=[link("m/model.safetensors", "blobs/1")])
    registry.push("org/links", "1", layer)
    folder = await fetch(f"oci://{registry.host}/org/links:1/m")
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_image_of_this_platform_is_chosen_not_attestations(
    registry: RegistryClient, tmp_path: Path, model: dict[str, bytes]
) -> None:
    other = registry.push("org/multi", "other", *(titled(name, b"{}") for name in model))
    here = registry.push("org/multi", "here", *(titled(name, data) for name, data in model.items()))
    entries: list[dict[str, Any]] = [
        {"mediaType": MANIFEST, "digest": digest, "size": 1, "platform": {"os": "linux", "architecture": architecture}}
        for digest, architecture in ((other, "riscv64"), (here, "amd64"), (here, "arm64"))
    ]
    attestation = {"platform": {"os": "unknown", "architecture": "unknown"}, "annotations": ATTESTATION}
    entries.insert(0, {"mediaType": MANIFEST, "digest": other, "size": 1, **attestation})
    registry.put_manifest("org/multi", "1", INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    source = ImageSource(registry=registry.host, repository="org/multi", tag="1", digest=None)
    assert ImageOrigin(source).describe().parameters == ELEMENTS
    foreign = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entries[1], {**entries[1], "digest": here}]}
    registry.put_manifest("org/multi", "foreign", INDEX, foreign)
    with pytest.raises(FetchError, match="has no image for linux/") as caught:
        ImageOrigin(ImageSource(registry=registry.host, repository="org/multi", tag="foreign", digest=None)).listing()
    assert caught.value.hint == "there are: linux/riscv64, linux/riscv64"


async def test_broken_image_download_resumes_at_its_offset(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    weights = titled("model.safetensors", model["model.safetensors"])
    registry.push("org/cut", "1", titled("config.json", model["config.json"]), weights)
    registry.proxy.cut[weights.digest] = 2_000_000
    folder = await fetch(f"oci://{registry.host}/org/cut:1")
    assert held(folder)["model.safetensors"] == model["model.safetensors"]
    first, second = registry.proxy.ranges(weights.digest)
    assert first == "" and second.startswith("bytes=1")


async def test_damaged_layer_is_rejected_and_downloaded_again(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    layer = archive(model)
    registry.push("org/damaged", "1", layer)
    registry.proxy.damaged.add(layer.digest)
    with pytest.raises(FetchError, match="arrived damaged: its SHA-256"):
        await fetch(f"oci://{registry.host}/org/damaged:1")
    registry.proxy.damaged.clear()
    assert held(await fetch(f"oci://{registry.host}/org/damaged:1")) == model


async def test_pinned_image_is_verified_and_needs_no_network_later(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    digest = registry.push("org/pinned", "1", archive(model))
    other = registry.push("org/pinned", "2", archive({"x": b""}))
    source = f"oci://{registry.host}/org/pinned@{digest}"
    body = json.dumps({"schemaVersion": 2, "layers": []})
    registry.proxy.canned[digest] = Canned(200, body, {"Content-Type": MANIFEST})
    with pytest.raises(FetchError, match="with another manifest, sha256:"):
        await fetch(source)
    registry.proxy.canned.clear()
    folder = await fetch(source)
    registry.proxy.seen.clear()
    assert await fetch(source) == folder and not registry.proxy.seen
    assert digest != other


@pytest.mark.parametrize(
    ("scheme", "kept"), [("basic", "in a pull secret"), ("bearer", "by docker login"), ("bearer", "by a helper")]
)
async def test_registry_credentials_are_used(
    scheme: str,
    kept: str,
    registry: RegistryClient,
    fetch: Fetch,
    model: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    registry.push("org/private", "1", *(titled(name, data) for name, data in model.items()))
    registry.proxy.login, registry.proxy.scheme = ("me", "pass:word"), scheme
    auths = {"auths": {registry.host: {"auth": b64encode(b"me:pass:word").decode()}}}
    if kept == "in a pull secret":
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps(auths))
    else:
        (tmp_path / "docker").mkdir()
        body = auths if kept == "by docker login" else {"credsStore": "ours"}
        (tmp_path / "docker" / "config.json").write_text(json.dumps(body))
        helper = tmp_path / "docker" / "docker-credential-ours"
        helper.write_text('#!/bin/sh\necho \'{"Username": "me", "Secret": "pass:word"}\'\n')
        helper.chmod(0o755)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        monkeypatch.setenv("PATH", f"{tmp_path / 'docker'}:/usr/bin:/bin")
    assert held(await fetch(f"oci://{registry.host}/org/private:1")) == model


async def test_expired_registry_token_is_renewed(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = titled("model.safetensors", model["model.safetensors"])
    registry.push("org/token", "1", weights)
    registry.proxy.login, registry.proxy.token = ("me", "x"), "first"
    auths = {"auths": {registry.host: {"username": "me", "password": "x"}}}
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps(auths))
    registry.proxy.cut[weights.digest] = 1_500_000
    registry.proxy.renew_after_cut = "second"
    folder = await fetch(f"oci://{registry.host}/org/token:1")
    assert held(folder)["model.safetensors"] == model["model.safetensors"]
    assert {"Bearer first", "Bearer second"} <= set(registry.proxy.authorizations)


@pytest.mark.parametrize(
    ("login", "says"),
    [
        (None, "does not allow anonymous access to"),
        (("me", "wrong"), "does not allow me to read"),
        ("{", "is not JSON"),
    ],
)
async def test_missing_or_wrong_registry_credentials_are_reported(
    login: Any, says: str, registry: RegistryClient, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.proxy.login = ("me", "right")
    if login is not None:
        entry = {"username": login[0], "password": login[-1]}
        text = login if isinstance(login, str) else json.dumps({"auths": {registry.host: entry}})
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", text)
    with pytest.raises(FetchError, match=says) as caught:
        await fetch(f"oci://{registry.host}/org/private:1")
    assert "wrong" not in str(caught.value)


async def test_missing_image_folder_and_model_are_reported(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    with pytest.raises(FetchError, match=r"has no .*/org/none:1 \(MANIFEST_UNKNOWN"):
        await fetch(f"oci://{registry.host}/org/none:1")
    registry.push("org/odd", "1", archive(under("weights", model)))
    with pytest.raises(FetchError, match="has no folder model"):
        await fetch(f"oci://{registry.host}/org/odd:1/model")
    registry.push("org/odd", "2", Layer(data=b"GGUF", media_type="application/vnd.gguf", annotations={}))
    with pytest.raises(FetchError, match="a layer of type application/vnd.gguf"):
        await fetch(f"oci://{registry.host}/org/odd:2")
    registry.push("org/odd", "3", titled("config.json", b"{}"))
    with pytest.raises(FetchError, match="has no safetensors weights"):
        await fetch(f"oci://{registry.host}/org/odd:3")
    broken = archive(model, compression="gzip")
    registry.push("org/odd", "4", Layer(data=broken.data[:2000], media_type=broken.media_type, annotations={}))
    with pytest.raises(FetchError, match="cannot be unpacked"):
        await fetch(f"oci://{registry.host}/org/odd:4")
    with pytest.raises(FetchError, match="127.0.0.1:9 cannot be reached"):
        await fetch("oci://127.0.0.1:9/org/odd:1")


async def test_stop_while_unpacking_keeps_the_download(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = archive({"old.json": b"{}", "tokenizer.json": b"old"}), archive(model)
    registry.push("org/stopped", "1", first, second)
    applied: list[str] = []

    def stops_once(layer: Any, source: Path, *rest: Any, **options: Any) -> None:
        applied.append(layer.blob.digest)
        if len(applied) == 2:
            raise OSError(5, "Input/output error")
        image_layers.apply(layer, source, *rest, **options)

    monkeypatch.setattr(image, "apply", stops_once)
    with pytest.raises(FetchError, match="org/stopped:1 cannot be stored in .*Input/output error"):
        await fetch(f"oci://{registry.host}/org/stopped:1")
    folder = await fetch(f"oci://{registry.host}/org/stopped:1")
    assert held(folder) == {**model, "old.json": b"{}"}
    assert applied == [first.digest, second.digest, second.digest], "a layer that is applied is not applied again"
    assert [len(registry.proxy.ranges(layer.digest)) for layer in (first, second)] == [1, 1]


@pytest.mark.parametrize("compression", ["", "gzip"])
def test_plan_finds_the_configuration_at_the_start_of_an_archive(
    compression: str, registry: RegistryClient, tmp_path: Path, model: dict[str, bytes]
) -> None:
    registry.push("org/plan", f"v{compression}", archive(under("m", model), compression=compression))
    source = ImageSource(registry=registry.host, repository="org/plan", tag=f"v{compression}", digest=None, path="m")
    found = ImageOrigin(source).describe()
    assert (found.parameters, found.config) == (None, CONFIG)
    with pytest.raises(FetchError, match="no layer of .* has other/config.json within its first 16 MiB") as caught:
        ImageOrigin(replace(source, path="other")).describe()
    assert caught.value.hint is not None and "quire fetch oci://" in caught.value.hint


def test_plan_counts_the_weights_of_single_files(
    registry: RegistryClient, tmp_path: Path, model: dict[str, bytes]
) -> None:
    registry.push("org/counted", "1", *(titled(name, data) for name, data in model.items()))
    source = ImageSource(registry=registry.host, repository="org/counted", tag="1", digest=None)
    found = ImageOrigin(source).describe()
    assert (found.parameters, found.config) == (ELEMENTS, CONFIG)
