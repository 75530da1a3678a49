"""A small model, and its stores: a hub, and an S3 server on loopback behind a proxy that can fail."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fetch_support.faulty_proxy import FaultyProxy
from fetch_support.hub_stub import HubStub, safetensors, serving
from fetch_support.model import CONFIG, ELEMENTS
from moto.server import ThreadedMotoServer

from quire_common.model_source import RemoteSource, parse_source
from quire_engine.fetch import model_cache
from quire_engine.fetch.model_cache import Manner
from quire_engine.fetch.transfer import Patience

_FROM_OUTSIDE = ("AWS_", "HF_")


@pytest.fixture(scope="session")
def model() -> dict[str, bytes]:
    """Return the files by name."""
    weights = safetensors(ELEMENTS)
    return {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights, "tokenizer.json": b"{}"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove this machine's own logins and addresses from the environment."""
    for name in os.environ:
        if name.startswith(_FROM_OUTSIDE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., object]:
    """Return a function that fetches a source to the cache of this test, with short waits between attempts."""

    async def fetched(
        text: str,
        *,
        say: Callable[[str], None] = lambda line: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        of_adapter: bool = False,
    ) -> Path:
        source = parse_source(text)
        assert isinstance(source, RemoteSource), text
        manner = Manner(patience=Patience(first_wait_seconds=0.01, attempts=3), say=say)
        origin = model_cache.origin_of(source, of_adapter=of_adapter)
        return await model_cache.fetch(source, origin, tmp_path / "cache", progress=progress, manner=manner)

    return fetched


@pytest.fixture
def hub(model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    stub = HubStub(repository="org/tiny", files=model)
    with serving(stub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield stub


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Yield the address of a store with the bucket `models`; each test puts its model below its own prefix."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    httpx.put(f"{address}/models").raise_for_status()
    yield address
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Yield the proxy of the store that the environment names, with credentials."""
    proxy = FaultyProxy(s3_server)
    with serving(proxy) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield proxy
