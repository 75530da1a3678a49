"""The bucket of the scenarios is one from which quire-fetch downloads."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e_support import bucket_server
from e2e_support.model_bucket import source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def endpoint(folder: Path) -> Iterator[str]:
    server = bucket_server.server(folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_model_is_downloaded_from_the_bucket(endpoint: str, folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "models" / "chat"
    to.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "quire_engine.fetch", source(endpoint), "--to", str(to)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in to.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
