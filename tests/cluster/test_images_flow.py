"""Building, inspecting and pushing images, with a script instead of buildah and a registry in a thread."""

import fcntl
import io
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from page_server import page_server

from quire_cluster.errors import BinaryUnavailable, ImageBuildFailed
from quire_cluster.images import buildah, ensure
from quire_cluster.images.ensure import build_images, ensure_images, images_of
from quire_cluster.images.ensure import images as images_command
from quire_cluster.images.inputs import TARGETS, BuildOptions
from quire_cluster.progress import Progress

# Remembers images as files named after them, and every call in a log.
FAKE_BUILDAH = """\
#!/bin/sh
shift 3
echo "$@" >> {home}/calls
verb=$1; shift
for last; do :; done
image() {{ echo "{home}/images/$(echo "$1" | tr / _)"; }}
case $verb in
  build)
    echo "STEP 1/1: FROM nothing"
    for word; do case $word in --tag=*) tag=${{word#--tag=}} ;; --target=*) target=${{word#--target=}} ;; esac; done
    if [ "$target" ] && [ "$target" = "$(cat {home}/fails 2> /dev/null)" ]; then echo "no such package"; exit 9; fi
    echo "${{target:-base}}" > "$(image "$tag")" ;;
  inspect)
    test -e "$(image "$last")" || exit 1
    sed "s/TARGET/$(cat "$(image "$last")")/" {home}/description ;;
  tag) cp "$(image "$1")" "$(image "$2")" ;;
  rmi) test "$1" = --all || rm "$(image "$1")" ;;
  from) echo working ;;
  mount) echo {home}/root ;;
  run) case $last in -u) echo 65532 ;; *) echo "it says something" ;; esac ;;
esac
"""
DOCKERFILE = """\
ARG BASE_IMAGE=debian
FROM ${BASE_IMAGE} AS base

FROM base AS engine
ARG COMPILER
COPY engine .

FROM base AS operator
COPY operator .

FROM base AS gateway
COPY gateway .
"""
DESCRIPTION = {
    "OCIv1": {
        "config": {"User": "65532:65532", "Entrypoint": ["quire-TARGET"], "Env": ["PATH=/opt/quire/bin"]},
        "rootfs": {"diff_ids": ["sha256:a"]},
        "history": [{"created_by": "/bin/sh -c #(nop) COPY dir in /opt/quire"}],
    }
}


class Machine(NamedTuple):
    home: Path
    checkout: Path
    registry: str
    known: dict[str, str]  # what the registry has: the path of a manifest, and the manifest

    def calls(self, verb: str) -> list[str]:
        log = self.home / "calls"
        return [line for line in log.read_text().splitlines() if line.split()[0] == verb] if log.exists() else []

    def built(self) -> list[str]:
        """Return the targets in the order of their builds."""
        words = [word for call in self.calls("build") for word in call.split()]
        return [word.removeprefix("--target=") for word in words if word.startswith("--target=")]

    def pushed(self) -> list[str]:
        return [call.split()[-1].removeprefix(f"docker://{self.registry}/") for call in self.calls("push")]

    def put_before_builds(self, command: str) -> None:
        buildah = Path(shutil.which("buildah") or "")
        buildah.write_text(buildah.read_text().replace("  build)", f"  build)\n    {command}", 1))

    def has(self, target: str) -> None:
        image = images_of(self.registry, BuildOptions(), self.checkout).by_target()[target]
        self.known[f"/v2/{image.repository}/manifests/{image.tag}"] = json.dumps({"layers": [{"size": 2_000_000}]})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine with buildah and root, without built images, and with an empty registry."""
    home = tmp_path / "buildah"
    for folder in (home / "images", home / "root" / "licenses", tmp_path / "path"):
        folder.mkdir(parents=True)
    (home / "root" / "licenses" / "LICENSE").touch()
    (home / "description").write_text(json.dumps(DESCRIPTION))
    for name, text in {"buildah": FAKE_BUILDAH.format(home=home), "mmdebstrap": "#!/bin/sh\n"}.items():
        (tmp_path / "path" / name).write_text(text)
        (tmp_path / "path" / name).chmod(0o755)
    layers = tmp_path / "cache" / "quire" / "images" / "storage" / "overlay-layers"
    layers.mkdir(parents=True)
    (layers / "layers.json").write_text(json.dumps([{"diff-digest": "sha256:a", "diff-size": 3_000_000}]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    monkeypatch.setattr(buildah.os, "geteuid", lambda: 0)
    monkeypatch.setattr(buildah, "FREE_BYTES_TO_BUILD", 0)
    for name in ("BASE_IMAGE", "TORCH_SPEC", "COMPILER", "PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    checkout = tmp_path / "checkout"
    for name, text in {"Dockerfile": DOCKERFILE, ".dockerignore": "", **{target: target for target in TARGETS}}.items():
        checkout.mkdir(exist_ok=True)
        (checkout / name).write_text(text)
    monkeypatch.setattr(ensure, "CONTEXT", checkout)
    known: dict[str, str] = {}

    def answer(path: str) -> tuple[int, str]:
        return (200 if path in known or path == "/v2/" else 404), known.get(path, "{}")

    with page_server(answer) as url:
        yield Machine(home, checkout, url.removeprefix("http://"), known)


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(said: io.StringIO) -> Progress:
    return Progress(said)


def test_missing_images_are_built_checked_and_pushed(machine: Machine, progress: Progress) -> None:
    images = ensure_images(machine.registry, progress)
    assert machine.built() == list(TARGETS)
    assert machine.pushed() == [f"quire-{target}:{images.by_target()[target].tag}" for target in TARGETS]
    assert all("--tls-verify=false" in call for call in machine.calls("push"))
    assert len(machine.calls("from")) == 3


def test_images_in_the_registry_are_not_rebuilt(machine: Machine, progress: Progress) -> None:
    for target in TARGETS:
        machine.has(target)
    ensure_images(machine.registry, progress)
    assert not (machine.home / "calls").exists()


def test_only_what_the_registry_lacks_is_built(machine: Machine, progress: Progress) -> None:
    machine.has("gateway")
    machine.has("engine")
    ensure_images(machine.registry, progress)
    assert machine.built() == ["operator"]
    assert len(machine.pushed()) == 1


def test_edit_during_a_build_is_for_the_next(machine: Machine, progress: Progress) -> None:
    before = images_of(machine.registry, BuildOptions(), machine.checkout)
    machine.put_before_builds(f"echo edited >> {machine.checkout}/engine")
    assert ensure_images(machine.registry, progress) == before
    after = images_of(machine.registry, BuildOptions(), machine.checkout)
    assert after.engine != before.engine
    assert after.gateway == before.gateway


def test_images_in_the_store_are_pushed_without_a_build(machine: Machine, progress: Progress) -> None:
    build_images(progress)
    (machine.home / "calls").unlink()
    ensure_images(machine.registry, progress)
    assert machine.built() == []
    assert len(machine.pushed()) == 3


def test_failed_build_shows_the_last_output(machine: Machine, progress: Progress) -> None:
    (machine.home / "fails").write_text("operator")
    with pytest.raises(ImageBuildFailed, match=r"(?s)quire-operator:\w+-unchecked: .*status 9.*no such package"):
        ensure_images(machine.registry, progress)
    assert machine.built() == ["gateway", "operator"]
    assert machine.pushed() == []


@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ("root user", "it runs as root; it has to be 65532:65532"),
        ("index", "its environment has UV_DEFAULT_INDEX"),
        ("setuid", "/usr/bin/su is setuid or setgid"),
        ("pip", "pip is installed in /opt/quire"),
        ("compiler", "/usr/bin/gcc is there"),
        ("settings", "/etc/pip.conf is of the build or of the machine it ran on"),
        ("license", "/licenses/LICENSE is missing"),
    ],
)
def test_image_that_breaks_a_promise_is_not_kept(
    machine: Machine, progress: Progress, breakage: str, complaint: str
) -> None:
    break_promise(machine.home, breakage)
    for _ in range(2):  # the second run must not take it for good either
        with pytest.raises(ImageBuildFailed, match=complaint):
            ensure_images(machine.registry, progress)
    assert machine.built() == ["gateway", "gateway"]
    assert machine.pushed() == []


def break_promise(home: Path, breakage: str) -> None:
    root, description = home / "root", json.loads(json.dumps(DESCRIPTION))
    configuration = description["OCIv1"]["config"]
    match breakage:
        case "root user":
            configuration["User"] = ""
        case "index":
            configuration["Env"].append("UV_DEFAULT_INDEX=https://user:password@packages.example/simple")
        case "license":
            shutil.rmtree(root / "licenses")
        case "pip":
            (root / "opt/quire/lib/python3.11/site-packages/pip-26.0.dist-info").mkdir(parents=True)
        case _:
            path = root / {"setuid": "usr/bin/su", "compiler": "usr/bin/gcc", "settings": "etc/pip.conf"}[breakage]
            path.parent.mkdir(parents=True)
            path.touch()
            path.chmod(0o4755 if breakage == "setuid" else 0o755)
    (home / "description").write_text(json.dumps(description))


def test_requested_compiler_is_allowed_in_the_image(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_promise(machine.home, "compiler")
    monkeypatch.setenv("COMPILER", "gcc libc6-dev")
    build_images(progress)
    assert machine.built() == list(TARGETS)


def test_index_addresses_are_not_on_the_command_line(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@packages.example/simple")
    build_images(progress)
    assert all("--build-arg=UV_DEFAULT_INDEX " in call for call in machine.calls("build"))
    assert "password" not in (machine.home / "calls").read_text()


def test_base_that_cannot_be_pulled_names_the_ways_out(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE_IMAGE", "nowhere.example/python:3")
    buildah = Path(shutil.which("buildah") or "")
    buildah.write_text(buildah.read_text().replace("  from)", "  pull) echo no route; exit 125 ;;\n  from)"))
    with pytest.raises(ImageBuildFailed, match=r"(?s)no route.*BASE_IMAGE is nowhere.example/python:3: name one that"):
        build_images(progress)


def test_full_disk_is_reported_before_a_build(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buildah, "FREE_BYTES_TO_BUILD", 10**18)
    with pytest.raises(ImageBuildFailed, match=r"takes 1000000000 GB of disk in .*set XDG_CACHE_HOME"):
        build_images(progress)
    assert machine.calls("build") == []


def test_store_that_has_grown_is_emptied_before_a_build(
    machine: Machine, progress: Progress, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buildah, "MOST_BYTES_KEPT", 2_999_999)
    build_images(progress)
    assert "of layers from earlier builds: removing them all" in said.getvalue()
    assert [call.split()[1:] for call in machine.calls("rmi")][0] == ["--all", "--force"]

    (machine.home / "calls").unlink()
    build_images(progress)
    assert machine.calls("rmi") == []  # there is nothing to build


def test_containers_that_builds_leave_are_removed(machine: Machine, progress: Progress) -> None:
    (machine.home / "fails").write_text("gateway")
    with pytest.raises(ImageBuildFailed):
        build_images(progress)
    calls = (machine.home / "calls").read_text().splitlines()
    assert calls[0] == calls[-1] == "rm --all"


def test_second_run_waits_for_the_first(machine: Machine, progress: Progress, said: io.StringIO) -> None:
    with (buildah.folder() / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=build_images, args=(progress,))
        waiting.start()
        while "another process builds the images; waiting" not in said.getvalue():
            assert waiting.is_alive()
        assert machine.calls("build") == []
    waiting.join()
    assert machine.built() == list(TARGETS)


def test_registry_that_does_not_answer_is_named(machine: Machine, progress: Progress) -> None:
    with pytest.raises(ImageBuildFailed, match=r"the registry 127\.0\.0\.1:1 cannot be reached: .*refused"):
        ensure_images("127.0.0.1:1", progress)


def test_non_root_user_gets_a_hint_about_docker(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buildah.os, "geteuid", lambda: 1000)
    with pytest.raises(BinaryUnavailable, match="docker build --target engine"):
        build_images(progress)


def test_missing_builder_is_installed_with_a_word_about_it(
    machine: Machine, progress: Progress, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(shutil.which("buildah") or "")
    here.rename(here.with_name("buildah.deb"))
    (here.parent / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {machine.home}/apt\nmv {here}.deb {here}\n')
    (here.parent / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here.parent}:/bin")
    monkeypatch.setattr(
        shutil, "which", lambda name: str(here.parent / name) if (here.parent / name).exists() else None
    )
    build_images(progress)
    assert (machine.home / "apt").read_text() == "--quiet install --yes --no-install-recommends buildah\n"
    assert "==> installing buildah (apt-get install buildah)\n" in said.getvalue()


def test_command_lists_layers_and_the_charts_values(
    machine: Machine, progress: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in TARGETS:
        machine.has(target)
    build_images(progress)
    assert images_command(machine.registry, None, progress) == 0
    printed = capsys.readouterr().out
    images = images_of(machine.registry, BuildOptions(), machine.checkout)
    assert f"{images.engine.reference}\n" in printed
    assert "      3.0 MB     2.0 MB  COPY dir in /opt/quire\n" in printed
    assert json.loads(printed.splitlines()[-1]) == images.chart_values()


def test_common_tag_is_pushed_in_addition_to_own_tags(
    machine: Machine, progress: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in TARGETS:
        machine.has(target)
    images_command(machine.registry, "0.1.0", progress)
    assert sorted(machine.pushed()) == ["quire-engine:0.1.0", "quire-gateway:0.1.0", "quire-operator:0.1.0"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "images": {"registry": machine.registry, "tag": "0.1.0"}
    }


def test_images_are_built_without_a_registry_with_a_note(
    machine: Machine, progress: Progress, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire_cluster.images.ensure.OWN", "127.0.0.1:1")
    assert images_command(None, None, progress) == 0
    assert machine.pushed() == []
    assert "Not pushed: the registry of the test cluster does not run (make cluster-up)" in capsys.readouterr().out
    with pytest.raises(ImageBuildFailed, match=r"say which, as in REGISTRY=registry\.example/team"):
        images_command(None, "0.1.0", progress)
