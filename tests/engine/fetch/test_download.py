"""quire-engine org/name: how arguments are classified as folders and sources, and the download into a given folder."""

from pathlib import Path

import pytest
from fetch_support.hub_stub import HubStub

from quire_engine.download import fetch_model, remote_source
from quire_engine.errors import ModelFolderError


@pytest.mark.parametrize(
    ("path", "revision", "source"),
    [
        ("/models/demo", None, None),
        ("demo", None, None),
        ("./demo", None, None),
        ("../demo", None, None),
        ("a/b/c", None, None),
        ("org/name", None, "hf://org/name@main"),
        ("org/name", "v1", "hf://org/name@v1"),
        ("hf://org/name@v2", None, "hf://org/name@v2"),
        ("s3://bucket/model", None, "s3://bucket/model"),
    ],
)
def test_model_argument_is_a_folder_or_a_source(path: str, revision: str | None, source: str | None) -> None:
    found = remote_source(Path(path), revision)
    assert (None if found is None else str(found)) == source


def test_a_folder_that_exists_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert remote_source(Path("org/name"), None) is None
    with pytest.raises(ModelFolderError, match="--revision v1"):
        remote_source(Path("org/name"), "v1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://UPPER", "s3://UPPER is not a source of models"),
        ("oci://reg.example/m:1/x", "oci://reg.example/m:1/x is an image, which only the kubelet .* unpack it"),
    ],
)
def test_what_cannot_be_downloaded_is_refused(text: str, says: str) -> None:
    with pytest.raises(ModelFolderError, match=says):
        remote_source(Path(text), None)


def test_a_model_of_a_hub_is_downloaded_once(hub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = remote_source(Path("org/tiny"), None)
    assert source is not None
    folder = fetch_model(source, tmp_path)
    assert folder.is_relative_to(tmp_path) and (folder / "model.safetensors").is_file()
    served = len(hub.served)
    assert fetch_model(source, tmp_path) == folder and len(hub.served) == served
    assert "hf://org/tiny@main" in capsys.readouterr().err
