"""Layers of untrusted images: whatever they contain, nothing outside their own folder is changed or read."""

from pathlib import Path

import pytest
from fetch_support.registry import Layer, archive, link, titled

from quire_engine.errors import FetchError
from quire_engine.fetch import image_layers
from quire_engine.fetch.registry import Blob

IMAGE = "registry.example/m:1"
# Each link is harmless alone: "c" leads to "others" while "d/e" does not exist, and "l" is "../x" from elsewhere.
UP_BY_LINKS = archive({"d/x": b""}, members=[link("c", "d/e/../../others"), link("d/e", ".")])
HARD_LINKS = archive({}, members=[link("a/b/l", "../x"), link("l", "a/b/l", hard=True)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a version's folder, with the folder of another model next to it."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "model.safetensors").write_bytes(b"theirs")
    version = tmp_path / "version.partial"
    (version / ".layers").mkdir(parents=True)
    return version


def lay(folder: Path, *layers: Layer, below: str = "") -> None:
    for number, pushed in enumerate(layers):
        source = folder / ".layers" / f"{number}"
        source.write_bytes(pushed.data)
        blob = Blob(digest="", size_bytes=0, media_type=pushed.media_type, annotations=pushed.annotations)
        layer = image_layers.layer_of(blob, IMAGE)
        image_layers.apply(layer, source, folder, below=below, image=IMAGE, stopped=lambda: False)


@pytest.mark.parametrize(
    ("layers", "below", "says"),
    [
        ((archive({".wh...": b""}),), "", "outside the model's folder"),
        ((archive({"m/x": b"", "m/.wh...": b""}),), "m", "outside the model's folder"),
        ((archive({".wh..layers": b""}),), "", "outside the model's folder"),
        ((UP_BY_LINKS,), "", "c to a path outside the model's folder"),
        ((archive({"a/x": b"", "a/b/x": b""}), HARD_LINKS), "", "l to a path outside the model's folder"),
        ((archive({"sub/x": b""}, members=[link("s", "sub")]), archive({"s/.wh.x": b""})), "", "below a link"),
        ((archive({"sub/x": b""}, members=[link("s", "sub")]), archive({"s/.wh..wh..opq": b""})), "", "below a link"),
        ((archive({"sub/x": b""}, members=[link("s", "sub")]), titled("s/config.json", b"{}")), "", "below a link"),
    ],
)
def test_layers_cannot_write_outside_their_folder(
    layers: tuple[Layer, ...], below: str, says: str, folder: Path
) -> None:
    with pytest.raises(FetchError, match=says):
        lay(folder, *layers, below=below)
    assert (folder.parent / "others" / "model.safetensors").read_bytes() == b"theirs"
    assert (folder / ".layers").is_dir(), "what is not applied yet is kept"


def test_cyclic_links_within_the_folder_are_ignored(folder: Path) -> None:
    lay(folder, archive({"m/x": b"x"}, members=[link("m/a", "b"), link("m/b", "a"), link("m/y", "x")]), below="m")
    assert (folder / "m" / "y").read_bytes() == b"x"
