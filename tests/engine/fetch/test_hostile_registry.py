"""A malicious or broken registry gets no login and cannot exhaust memory, disk or time."""

import re
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fetch_support.faulty_proxy import Canned
from fetch_support.registry import MANIFEST, RegistryClient, archive, titled

from quire_common.model_source import ImageSource
from quire_engine.errors import FetchError
from quire_engine.fetch import image
from quire_engine.fetch.image_layers import Kind, Layer
from quire_engine.fetch.registry import Blob, Registry

Fetch = Callable[..., Awaitable[Path]]


@pytest.mark.parametrize("status", [200, 404])
async def test_endless_registry_response_is_not_read_to_the_end(
    status: int, registry: RegistryClient, fetch: Fetch
) -> None:
    registry.proxy.canned["GET /v2/org/m/manifests/1"] = Canned(status, " " * (9 << 20), {"Content-Type": MANIFEST})
    with pytest.raises(FetchError, match="answers with more than 8 MiB"):
        await fetch(f"oci://{registry.host}/org/m:1")


async def test_a_blob_longer_than_promised_does_not_fill_the_disk(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    weights = titled("model.safetensors", model["model.safetensors"])
    registry.push("org/long", "1", weights)
    registry.proxy.canned[weights.digest] = Canned(200, "x" * (len(weights.data) + (20 << 20)))
    with pytest.raises(FetchError, match="arrived damaged: it has") as caught:
        await fetch(f"oci://{registry.host}/org/long:1")
    found = re.search(r"it has (\d+) bytes", str(caught.value))
    assert found is not None and int(found[1]) < len(weights.data) + (2 << 20)


async def test_registry_redirect_loop_is_aborted(
    registry: RegistryClient, fetch: Fetch, model: dict[str, bytes]
) -> None:
    weights = titled("model.safetensors", model["model.safetensors"])
    registry.push("org/round", "1", weights)
    registry.proxy.canned[weights.digest] = Canned(307, "", {"Location": f"/v2/org/round/blobs/{weights.digest}"})
    with pytest.raises(FetchError, match="cannot be reached for .*redirects"):
        await fetch(f"oci://{registry.host}/org/round:1")


@pytest.mark.parametrize(
    ("code", "login", "shown"),
    [
        ("MANIFEST_UNKNOWN", True, "MANIFEST_UNKNOWN: hunter2"),
        ("MANIFEST_UNKNOWN", False, "MANIFEST_UNKNOWN"),
        ("hunter2", False, None),
    ],
)
def test_only_the_registry_of_a_login_is_quoted(
    code: str, login: bool, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author of an adapter may name any server of the network as a registry."""
    body = {"errors": [{"code": code, "message": "hunter2"}]}
    answer = httpx.MockTransport(lambda request: httpx.Response(404, json=body))
    monkeypatch.setattr(Registry, "_client", lambda _: httpx.Client(transport=answer))
    if login:
        auth = '{"auths": {"registry.example": {"username": "me", "password": "secret"}}}'
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", auth)
    source = ImageSource(registry="registry.example", repository="org/m", tag="1", digest=None)
    with pytest.raises(FetchError) as caught:
        Registry(source).manifest()
    said = str(caught.value)
    assert f"({shown})" in said if shown else "hunter2" not in said and "(" not in said


@pytest.mark.parametrize("login", ["me:secret", None])
def test_credentials_are_never_sent_to_another_host(login: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(401, headers={"WWW-Authenticate": 'Bearer realm="http://192.0.2.1/token"'})

    monkeypatch.setattr(Registry, "_client", lambda _: httpx.Client(transport=httpx.MockTransport(answer)))
    if login is not None:
        auth = '{"auths": {"registry.example": {"username": "me", "password": "secret"}}}'
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", auth)
    source = ImageSource(registry="registry.example", repository="org/m", tag="1", digest=None)
    with pytest.raises(FetchError, match=r"requests credentials for http://192\.0\.2\.1/token, which is not HTTPS"):
        Registry(source).manifest()
    assert asked == ["https://registry.example/v2/org/m/manifests/1"]


def test_short_archive_is_not_requested_repeatedly() -> None:
    class Short(Registry):
        def read(self, digest: str, start: int, size: int) -> bytes:
            return cut[start : start + size]

    cut = archive({"config.json": b"{}" * 5_000}).data[:2_000]
    source = ImageSource(registry="registry.example", repository="org/m", tag="1", digest=None)
    blob = Blob(digest="sha256:0", size_bytes=1 << 20, media_type="", annotations={})
    stream = image._Ranges(Short(source), Layer(blob=blob, kind=Kind.ARCHIVE, path=""))
    assert stream.read(tarfile.RECORDSIZE) == cut
    assert stream.read(tarfile.RECORDSIZE) == b""
