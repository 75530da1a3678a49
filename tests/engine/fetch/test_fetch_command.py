"""`quire-fetch` as the init container of a pod runs it: several at once, killed, stopped, with a full disk."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fetch_support.hub_stub import COMMIT, HubStub

from quire_cluster.ports import free_ports
from quire_common.contract.engine import FETCHED_VERSION
from quire_engine.errors import FetchError

Fetch = Callable[..., Awaitable[Path]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a fetch in its own process; processes that still run at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(source: str, to: Path, *options: str, most_bytes: int | None = None) -> subprocess.Popen[str]:
        def limit() -> None:
            assert most_bytes is not None
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        command = [sys.executable, "-m", "quire_engine.fetch", source, "--to", str(to), *options]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit if most_bytes is not None else None,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_part(folder: Path, size: int) -> Path:
    """Return the unfinished weights when they have this size."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for part in folder.rglob(".model.safetensors.part"):
            if part.stat().st_size >= size:
                return part
        time.sleep(0.02)
    raise AssertionError("nothing was downloaded")


def test_pods_that_share_a_claim_download_once(
    hub: HubStub, start: Start, tmp_path: Path, model: dict[str, bytes]
) -> None:
    fetches = [start("hf://org/tiny", tmp_path / f"llm-{number}") for number in range(3)]
    for fetch in fetches:
        out, err = fetch.communicate(timeout=120)
        assert fetch.returncode == 0, out + err
    assert hub.ranges("model.safetensors") == [""], "the first one downloaded it for all"
    for number in range(3):
        assert (tmp_path / f"llm-{number}" / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_next_pod_resumes_download_of_a_killed_pod(
    hub: HubStub, start: Start, tmp_path: Path, model: dict[str, bytes]
) -> None:
    hub.stall_after["model.safetensors"] = 2_000_000
    killed = start("hf://org/tiny", tmp_path / "m")
    wait_for_part(tmp_path, 1_000_000)
    waiting = start("hf://org/tiny", tmp_path / "m")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, out + err
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == model["model.safetensors"]
    first, second = hub.ranges("model.safetensors")
    assert first == "" and second.startswith("bytes=1"), "what was there is not fetched again"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_stops_the_download_and_keeps_partial_files(
    number: signal.Signals, code: int, hub: HubStub, start: Start, tmp_path: Path
) -> None:
    hub.stall_after["model.safetensors"] = 2_000_000
    stopped = start("hf://org/tiny", tmp_path / "m")
    part = wait_for_part(tmp_path, 2**20)
    stopped.send_signal(number)
    out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, err) == (code, "")
    assert "stopped; downloaded data is kept" in out
    assert part.exists() and not (tmp_path / "m").exists()
    assert not list(tmp_path.rglob("lock.owner")), "the lock is given back"


def test_disk_full_during_download_is_reported(hub: HubStub, start: Start, tmp_path: Path) -> None:
    """A limit on the size of the process's files fails like a full disk, with another error number."""
    out, err = start("hf://org/tiny", tmp_path / "m", most_bytes=1_500_000).communicate(timeout=60)
    assert "org/tiny cannot be stored in" in err and "File too large" in err and "Traceback" not in err


async def test_full_disk_error_is_distinct_and_names_quire_cache(
    hub: HubStub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(out: object, piece: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire_engine.fetch.transfer._write", full)
    with pytest.raises(FetchError, match="org/tiny cannot be stored in .*: the disk is full") as caught:
        await fetch("hf://org/tiny")
    assert caught.value.hint is not None and "QUIRE_CACHE" in caught.value.hint


async def test_insufficient_disk_space_fails_before_download(
    hub: HubStub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    abandoned = tmp_path / "cache" / "org--tiny" / "0000.partial"
    abandoned.mkdir(parents=True)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(FetchError, match=r"org/tiny needs 2.38 MiB more in .*, where 1000 B are free"):
        await fetch("hf://org/tiny")
    assert hub.served == []
    assert not abandoned.exists(), "what another version began made room first"


def test_termination_message_has_the_failure_in_one_line(hub: HubStub, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    failed = start("hf://org/none", tmp_path / "m", "--termination-log", str(log))
    _, err = failed.communicate(timeout=60)
    assert failed.returncode == 2 and "has no model org/none" in err
    (line,) = log.read_text().splitlines()
    assert line.startswith("quire: ") and "has no model org/none" in line and "check the spelling" in line


def test_termination_message_has_the_version(hub: HubStub, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    done = start("hf://org/tiny", tmp_path / "m", "--termination-log", str(log))
    assert done.wait(timeout=60) == 0
    assert log.read_text() == f"{FETCHED_VERSION}{COMMIT}"


def asked(port: int, path: str = "/progress") -> tuple[int, bytes]:
    """Return a download's answer about its progress; the status is 0 if it does not answer."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5)
    except httpx.TransportError:
        return 0, b""
    return answer.status_code, answer.content


def test_progress_is_served_while_it_downloads(hub: HubStub, start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    hub.stall_after["model.safetensors"] = 2_000_000
    process = start("hf://org/tiny", tmp_path / "m", "--progress-port", str(port))
    part = wait_for_part(tmp_path, 2**20)
    deadline = time.monotonic() + 90
    while (answer := asked(port))[0] != 200 or json.loads(answer[1])["done"] < part.stat().st_size:
        assert time.monotonic() < deadline and process.poll() is None, answer
        time.sleep(0.05)
    total = sum(map(len, hub.files.values()))
    assert json.loads(answer[1])["total"] == total and json.loads(answer[1])["done"] < total
    assert asked(port, "/metrics")[0] == 404


def test_occupied_progress_port_does_not_stop_a_download(hub: HubStub, start: Start, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("hf://org/tiny", tmp_path / "m", "--progress-port", str(port))
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and f"progress is not served: port {port}" in out


def test_progress_is_logged_in_bytes_and_percent(hub: HubStub, start: Start, tmp_path: Path) -> None:
    out, _ = start("hf://org/tiny", tmp_path / "m").communicate(timeout=60)
    first, *_, last, done = out.splitlines()
    assert first == "hf://org/tiny@main: 0 B of 2.38 MiB"
    assert last.startswith("hf://org/tiny@main: 2.38 MiB of 2.38 MiB (100 %), ") and last.endswith("/s")
    assert done == f"hf://org/tiny@main is at {tmp_path / 'm'}"


async def test_damaged_small_file_is_detected(hub: HubStub, fetch: Fetch) -> None:
    hub.damaged.add("config.json")
    with pytest.raises(FetchError, match="config.json of org/tiny arrived damaged: its git blob SHA-1"):
        await fetch("hf://org/tiny")


async def test_cached_commit_needs_no_hub(hub: HubStub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = await fetch("hf://org/tiny")
    monkeypatch.setitem(os.environ, "HF_ENDPOINT", "http://127.0.0.1:9")
    hub.tokens.clear()
    assert await fetch(f"hf://org/tiny@{folder.name}") == folder
    assert hub.tokens == []
