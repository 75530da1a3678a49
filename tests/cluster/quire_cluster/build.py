"""Run `go` for one package and report the progress. Go writes only inside the given workspace.

This module knows no cache and no lock: `binaries` calls it and moves the result into place.
"""

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.errors import BuildFailed
from quire_cluster.progress import Progress, minutes_and_seconds
from quire_cluster.shell import follow
from quire_cluster.toolchain import GoToolchain

MODULES: Final = Path(__file__).parent.parent
LAST_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that Go builds, and the resulting programs."""

    name: str
    version: str
    programs: tuple[str, ...]
    compiled_packages: int  # about how many; only to say how far a build is
    cold_minutes: int  # on 2 cores
    install: str | None = None  # `go install` target; None: the module in MODULES/NAME, one program under several names
    version_flags: tuple[str, ...] = ()
    main: str = "."  # the package to build, if it is that of a module which the own module requires
    files: tuple[str, ...] = ()  # files of that module which are kept with the programs

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def module(self) -> Path | None:
        """Return the folder of the source if it is part of this repository."""
        return MODULES / self.name if self.install is None else None


def build(package: Package, *, toolchain: GoToolchain, workspace: Path, into: Path, progress: Progress) -> None:
    """Build the package's programs in `into`. A second call with the same workspace resumes a stopped build."""
    into.mkdir(parents=True, exist_ok=True)
    command, folder = _command(package, toolchain.go, into)
    environment = _environment(toolchain.go, workspace, into)
    started = time.monotonic()
    counter = _Counter(package)

    def see(line: str) -> None:
        counter.see(line)
        progress.update(f"    {counter}, {minutes_and_seconds(time.monotonic() - started)}")

    status = follow(command, environment=environment, see=see, cwd=folder)
    if status != 0:
        raise BuildFailed(_explain(package, status, counter.last_lines))
    if package.module is not None:
        for program in package.programs:
            if program != package.name:
                (into / program).symlink_to(package.name)
    if package.files:
        _copy_files(package, toolchain.go, environment, into)
    progress.say(f"    {package.title}: built in {minutes_and_seconds(time.monotonic() - started)}")


def _command(package: Package, go: Path, into: Path) -> tuple[list[str], Path]:
    linker = " ".join(["-s", "-w", *(f"-X {flag}" for flag in package.version_flags)])
    options = ["-v", "-trimpath", "-ldflags", linker]
    if package.module is not None:
        return [str(go), "build", *options, "-o", str(into / package.name), package.main], package.module
    return [str(go), "install", *options, f"{package.install}@v{package.version}"], into


def _copy_files(package: Package, go: Path, environment: dict[str, str], into: Path) -> None:
    """Copy files of the module that contains the program, which the module cache loses after the build."""
    command = [str(go), "list", "-f", "{{.Module.Dir}}", package.main]
    listed = subprocess.run(command, cwd=package.module, env=environment, capture_output=True, text=True)
    if listed.returncode != 0:
        raise BuildFailed(f"{package.title}: its files were not found: {listed.stderr.strip()}")
    for file in package.files:
        shutil.copyfile(Path(listed.stdout.strip()) / file, into / Path(file).name)


def _environment(go: Path, workspace: Path, into: Path) -> dict[str, str]:
    """Return the caller's environment without variables that change the result or write outside the workspace.

    GOMODCACHE and GOCACHE of the caller are used if set, so that CI can keep them between runs.
    """
    own = {
        "CGO_ENABLED": "0",
        "GO111MODULE": "on",
        "GOBIN": str(into),
        "GOENV": "off",
        "GOFLAGS": "-buildvcs=false -modcacherw",  # a writable module cache can be deleted like any folder
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "PATH": f"{go.parent}{os.pathsep}{os.environ['PATH']}",
    }
    defaults = {
        "GOMODCACHE": str(workspace / "modules"),
        "GOCACHE": str(workspace / "objects"),
        "GOPATH": str(workspace / "gopath"),
    }
    return defaults | dict(os.environ) | own


def _explain(package: Package, status: int, last_lines: Iterable[str]) -> str:
    quoted = "\n".join(f"    {line}" for line in last_lines)
    return (
        f"building {package.title} failed: go ended with status {status}. Its last lines:\n{quoted}\n"
        "It needs the Go module proxy (environment variable GOPROXY), about 8 GB of disk while it builds "
        "and 4 GB of memory. Or set KUBEBUILDER_ASSETS to a folder that has the programs."
    )


class _Counter:
    """A counter of the progress from `go build -v`: downloaded modules, then compiled packages."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._modules = 0
        self._compiled = 0
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    def see(self, line: str) -> None:
        if line.startswith("go: downloading "):
            self._modules += 1
        else:
            self._compiled += 1
            self.last_lines.append(line)

    def __str__(self) -> str:
        if self._compiled == 0:
            return f"{self._package.title}: {self._modules} modules fetched"
        return f"{self._package.title}: {self._compiled} of about {self._package.compiled_packages} packages compiled"
