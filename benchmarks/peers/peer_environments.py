"""The environments of peers: each is a folder in the cache, created in steps, with a mark at the end.

A folder without its mark is incomplete and is created again. Two installers of one folder wait for each other.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MARK = "installed.json"
LOG = "install.log"
_LAST_LINES = 15


class PeerError(Exception):
    """A peer that cannot be installed, or is not installed. The message states a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    version: str

    @property
    def folder(self) -> Path:
        return peers_folder() / f"{self.name}-{self.version}"

    @property
    def environment(self) -> Path:
        return self.folder / "venv"

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def installed(self) -> bool:
        mark = self.folder / MARK
        try:
            return bool(json.loads(mark.read_text(encoding="utf-8"))["seconds"] >= 0)
        except (OSError, ValueError, KeyError, TypeError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of a peer's installation, and its message."""

    what: str
    do: Callable[["Workshop"], None]


class Workshop:
    """The folder in which a peer is being installed: it runs commands there, at the lowest priority, with one log."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.folder = peer.folder
        self._log = peer.folder / LOG

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Run a command. Raise PeerError with the end of its output if it fails."""
        words = [str(word) for word in command]
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(words)}\n".encode())
            log.flush()
            try:
                ended = subprocess.run(
                    words,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    check=False,
                    preexec_fn=_yield_to_others,
                )
            except FileNotFoundError:
                raise PeerError(f"{words[0]} is not installed here, and {self.peer.name} needs it") from None
        if ended.returncode:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            told = "\n  ".join(said)
            raise PeerError(
                f"`{' '.join(words)[:200]}` ended with {ended.returncode}:\n  {told}\nall of it: {self._log}"
            )

    def create_environment(self) -> None:
        self.uv("venv", "-q", "--clear", "--python", sys.executable, str(self.peer.environment))

    def install(self, *arguments: str) -> None:
        """Run ``pip install`` in the peer's environment, from uv's cache if possible."""
        self.uv("pip", "install", "--python", str(self.peer.python), *arguments)

    def uv(self, *arguments: str) -> None:
        # The machine's own certificates, as in requirements/install.sh.
        self.run(_uv(), *arguments, environment={"UV_SYSTEM_CERTS": os.environ.get("UV_SYSTEM_CERTS", "1")})


def peers_folder() -> Path:
    """Return $XDG_CACHE_HOME/quire/peers, by default ~/.cache/quire/peers."""
    cache = os.environ.get("XDG_CACHE_HOME")
    # Commands run in their own folders, where a relative path would have another meaning.
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "quire" / "peers"


def say(words: str) -> None:
    """Print a line at once, even to a file, because a step takes minutes."""
    print(words, flush=True)


def make(peer: Peer, steps: Sequence[Step], *, again: bool) -> None:
    """Install ``peer`` unless it is installed, or again with ``again``. Raise PeerError."""
    peer.folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(peer):
        if peer.installed and not again:
            say(f"{peer.name} {peer.version} is installed in {peer.folder}")
            return
        if peer.folder.exists():
            say(f"==> {peer.name} {peer.version}: removing what lies in {peer.folder}")
            shutil.rmtree(peer.folder)
        peer.folder.mkdir()
        workshop, began = Workshop(peer), time.monotonic()
        for number, step in enumerate(steps, 1):
            say(f"==> {peer.name} {peer.version} [{number}/{len(steps)}] {step.what}")
            started = time.monotonic()
            step.do(workshop)
            say(f"    done in {time.monotonic() - started:.0f} s")
        seconds = round(time.monotonic() - began)
        record = {"name": peer.name, "version": peer.version, "seconds": seconds}
        (peer.folder / MARK).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say(f"{peer.name} {peer.version} is installed in {peer.folder} ({seconds} s)")


def command_line(description: str | None, peer: Peer, steps: Sequence[Step]) -> None:
    """Run a peer's script: install it, and report errors in one line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="remove what is there and start over")
    arguments = parser.parse_args()
    try:
        make(peer, steps, again=arguments.again)
    except (PeerError, OSError, tarfile.TarError) as problem:
        sys.exit(f"{peer.name} {peer.version} could not be installed: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; run it again, and {peer.folder} is created again")


@contextmanager
def _alone(peer: Peer) -> Iterator[None]:
    with (peer.folder.parent / f".{peer.folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that installs {peer.name} {peer.version}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _uv() -> Path:
    beside = Path(sys.executable).parent / "uv"
    found = beside if beside.exists() else shutil.which("uv")
    if not found:
        raise PeerError("uv is neither in .venv/bin nor on the PATH; `make setup` installs it")
    return Path(found)


def _yield_to_others() -> None:
    os.nice(19)
