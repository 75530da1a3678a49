"""Locations of the programs: `KUBEBUILDER_ASSETS` first, then the cache, then a build from Go modules.

A program is built once per version and machine type below `${XDG_CACHE_HOME:-~/.cache}/quire/`. It is moved into place
when it is complete, under a lock, so neither an interrupted build nor two parallel ones leave a partial program. This
module starts no process of the cluster.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from quire_cluster.build import Package, build
from quire_cluster.errors import BinaryUnavailable
from quire_cluster.progress import Progress
from quire_cluster.toolchain import find_go

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
