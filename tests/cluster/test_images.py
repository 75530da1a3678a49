"""Inputs and names of images: parsed Dockerfile, computed tags, listed layers, without a builder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.base_image import bootstrap_command, debian_base
from quire_cluster.images.ensure import CONTEXT, ImageLayers, Layer, images_of, instruction, layers_of, megabytes, table
from quire_cluster.images.inputs import (
    TARGETS,
    BuildOptions,
    Dockerfile,
    context_files,
    copy_context,
    fingerprint,
    ignored_names,
    parse,
)

TEXT = """\
# A comment.
ARG BASE=debian
FROM ${BASE} AS base
ENV A=1 \\
    # between lines
    B=2

FROM base AS tools
COPY tool.lock /opt/

FROM base AS one
ARG FLAVOUR="two words"
COPY one.lock shared /opt/
RUN --mount=type=bind,from=tools,source=/opt,target=/opt --mount=type=cache,target=/var/cache \\
    install && x
COPY --from=code /code /opt

FROM tools AS code
COPY --chown=1:1 code code

FROM base AS two
RUN --mount=type=bind,source=other.lock,target=/other.lock install
"""


@pytest.mark.parametrize(
    ("target", "stages", "sources"),
    [
        ("base", ["base"], []),
        ("code", ["base", "tools", "code"], ["tool.lock", "code"]),
        ("one", ["base", "tools", "one", "code"], ["tool.lock", "one.lock", "shared", "code"]),
        ("two", ["base", "two"], ["other.lock"]),
    ],
)
def test_target_needs_its_stages_and_what_they_copy(target: str, stages: list[str], sources: list[str]) -> None:
    needed = parse(TEXT).needed(target)
    assert [stage.name for stage in needed] == stages
    assert [source for stage in needed for source in stage.sources] == sources


def test_instruction_on_several_lines_is_one() -> None:
    (environment,) = parse(TEXT).stages[0].instructions
    assert (environment.keyword, environment.rest) == ("ENV", "A=1 B=2")


@pytest.mark.parametrize("target", TARGETS)
def test_own_dockerfile_is_read_whole(target: str) -> None:
    dockerfile = parse((CONTEXT / "Dockerfile").read_text())
    sources = [source for stage in dockerfile.needed(target) for source in stage.sources]
    assert {"LICENSE", target, f"requirements/{target}.lock", "requirements/bootstrap.lock"} <= set(sources)
    assert [source for source in sources if not (CONTEXT / source).exists()] == []
    others = {f"requirements/{other}.lock" for other in TARGETS if other != target}
    assert others.isdisjoint(sources)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / ".dockerignore").write_text("*\n!code\n**/__pycache__\n**/*.egg-info\n")
    for name in ("tool.lock", "one.lock", "other.lock", "shared", "code/a.py", "code/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def dockerfile() -> Dockerfile:
    return parse(TEXT)


def edited(name: str) -> Callable[[Path], object]:
    return lambda context: (context / name).write_text("changed")


IN_IMAGE = ("tool.lock", "one.lock", "shared", "code/a.py", "code/new.py")
NOT_IN_IMAGE = ("other.lock", "code/__pycache__/a.pyc", "code/quire.egg-info", "README")
EDITS: dict[str, tuple[Callable[[Path], object], bool]] = {
    **{name: (edited(name), True) for name in IN_IMAGE},
    **{name: (edited(name), False) for name in NOT_IN_IMAGE},
    "moved bytes": (lambda context: (context / "code/a.py").rename(context / "code/b.py"), True),
    "now executable": (lambda context: (context / "code/a.py").chmod(0o755), True),
}


@pytest.mark.parametrize(("edit", "counts"), EDITS.values(), ids=EDITS)
def test_only_files_of_an_image_change_its_tag(
    context: Path, dockerfile: Dockerfile, edit: Callable[[Path], object], counts: bool
) -> None:
    before = fingerprint(context, dockerfile, "one", {})
    edit(context)
    assert (fingerprint(context, dockerfile, "one", {}) != before) is counts


@pytest.mark.parametrize(
    ("name", "counts"), [("BASE", True), ("FLAVOUR", True), ("PIP_INDEX_URL", False)], ids=lambda value: str(value)
)
def test_only_build_arguments_of_a_target_change_its_tag(
    context: Path, dockerfile: Dockerfile, name: str, counts: bool
) -> None:
    plain = fingerprint(context, dockerfile, "one", {})
    assert (fingerprint(context, dockerfile, "one", {name: "value"}) != plain) is counts


def test_stages_of_other_targets_do_not_change_the_tag(context: Path, dockerfile: Dockerfile) -> None:
    changed = parse(TEXT.replace("/other.lock install", "/other.lock install --more"))
    assert fingerprint(context, changed, "one", {}) == fingerprint(context, dockerfile, "one", {})
    assert fingerprint(context, changed, "two", {}) != fingerprint(context, dockerfile, "two", {})


def test_dockerignore_patterns_apply_to_any_folder() -> None:
    assert ignored_names("*\n!engine\n**/__pycache__\n**/*.egg-info\n") == ("__pycache__", "*.egg-info")


def test_copied_context_gives_the_same_tags(context: Path, tmp_path: Path) -> None:
    (context / "Dockerfile").write_text(TEXT)
    copy = tmp_path / "copy"
    copy_context(context, copy)
    stages = parse(TEXT).stages
    assert [path.relative_to(copy) for path in context_files(copy, stages)] == [
        path.relative_to(context) for path in context_files(context, stages)
    ]
    for target in ("one", "two"):
        assert fingerprint(copy, parse(TEXT), target, {}) == fingerprint(context, parse(TEXT), target, {})
    assert not (copy / "code/__pycache__").exists()


def test_tags_of_the_three_images_are_their_own_and_stay() -> None:
    images = images_of("10.77.0.1:5000", BuildOptions(), CONTEXT)
    assert images == images_of("10.77.0.1:5000", BuildOptions(), CONTEXT)
    assert len({image.tag for image in images.by_target().values()}) == 3
    assert images.engine.reference == f"10.77.0.1:5000/quire-engine:{images.engine.tag}"


def test_compiler_and_torch_are_the_engines_alone() -> None:
    plain = images_of("registry", BuildOptions(), CONTEXT)
    other = images_of("registry", BuildOptions(compiler="gcc", torch_spec="torch==2.12.0"), CONTEXT)
    assert plain.engine.tag != other.engine.tag
    assert (plain.operator, plain.gateway) == (other.operator, other.gateway)


def test_other_base_is_another_image() -> None:
    plain = images_of("registry", BuildOptions(), CONTEXT).by_target()
    other = images_of("registry", BuildOptions(base_image="python:3.12-slim-bookworm"), CONTEXT).by_target()
    assert all(plain[target].tag != other[target].tag for target in TARGETS)


def test_chart_accepts_each_image_by_repository_and_tag() -> None:
    images = images_of("registry.example/team", BuildOptions(), CONTEXT)
    values = json.loads(json.dumps(images.chart_values()))["images"]
    assert values["registry"] == "registry.example/team"
    assert values["engine"] == {"repository": "quire-engine", "tag": images.engine.tag}
    assert values.keys() == {"registry", *TARGETS}


def test_options_are_read_from_the_environment() -> None:
    assert BuildOptions.from_environment({}) == BuildOptions()
    named = {"BASE_IMAGE": "python:3.12-slim", "TORCH_SPEC": "torch==2.12.0", "COMPILER": "gcc libc6-dev"}
    options = BuildOptions.from_environment(named)
    assert options.arguments == named


def test_local_wheel_is_named_by_where_the_build_sees_it(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.touch()
    options = BuildOptions(torch_spec=str(wheel))
    assert options.torch_wheel == wheel
    assert options.arguments["TORCH_SPEC"] == f"/mnt/{wheel.name}"


@pytest.mark.parametrize("spec", ["", "torch==2.13.0", "https://wheels.example/torch-2.13.0-cp311-none-any.whl"])
def test_torch_from_an_index_or_an_address_is_no_local_wheel(spec: str) -> None:
    assert BuildOptions(torch_spec=spec).torch_wheel is None


def test_missing_wheel_is_named() -> None:
    with pytest.raises(ImageBuildFailed, match=r"TORCH_SPEC is /nowhere/torch\.whl, and there is no such file"):
        _ = BuildOptions(torch_spec="/nowhere/torch.whl").arguments


def test_base_is_named_after_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = debian_base()
    assert before.startswith("localhost/quire-base:bookworm-")
    monkeypatch.setattr("quire_cluster.images.base_image.PACKAGES", ("python3",))
    assert debian_base() != before


def test_base_image_contains_nothing_of_the_build_machine() -> None:
    (hook,) = [word for word in bootstrap_command("base.tar") if word.startswith("--customize-hook=")]
    assert hook == '--customize-hook=rm -f "$1"/etc/hostname "$1"/etc/resolv.conf'


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        ("/bin/sh -c #(nop) ADD file:" + "a" * 64 + " in / ", "ADD file in /"),
        ("/bin/sh -c apt-get update   && x", "apt-get update && x"),
        ("|1 TORCH_SPEC= /bin/sh -c . /opt/tools/environment", ". /opt/tools/environment"),
        ("|2 A=b c COMPILER=gcc libc6-dev /bin/sh -c x", "x"),
        ("|0 /bin/sh -c x", "x"),
        ("/bin/sh -c --mount=type=bind,from=tools,target=/t --mount=type=cache,target=/c install", "install"),
        ("COPY dir:" + "0" * 64 + " in /opt/quire", "COPY dir in /opt/quire"),
        ("RUN /bin/sh -c x # buildkit", "RUN /bin/sh -c x # buildkit"),
    ],
)
def test_history_reads_like_the_dockerfile(history: str, shown: str) -> None:
    assert instruction(history) == shown


DESCRIPTION = {
    "rootfs": {"diff_ids": ["sha256:a", "sha256:b"]},
    "history": [
        {"created_by": "/bin/sh -c #(nop) ADD file in /"},
        {"created_by": "/bin/sh -c #(nop) ENV A=1", "empty_layer": True},
        {"created_by": "COPY code"},
    ],
}


def test_layers_follow_the_history_without_metadata() -> None:
    unpacked = {"sha256:a": 200_000_000, "sha256:b": 3000}
    manifest = {"layers": [{"size": 90_000_000}, {"size": 1000}]}
    assert layers_of(DESCRIPTION, unpacked, manifest) == (
        Layer(made_by="ADD file in /", unpacked=200_000_000, compressed=90_000_000),
        Layer(made_by="COPY code", unpacked=3000, compressed=1000),
    )


def test_layers_outside_a_registry_have_no_compressed_size() -> None:
    assert [layer.compressed for layer in layers_of(DESCRIPTION, {}, None)] == [None, None]


def test_table_sums_up_each_image() -> None:
    layers = (
        Layer(made_by="ADD file in /", unpacked=2_500_000_000, compressed=90_000_000),
        Layer(made_by="x" * 200, unpacked=3000, compressed=1000),
    )
    assert table([ImageLayers(reference="registry/quire-engine:1", layers=layers)]).splitlines() == [
        "registry/quire-engine:1",
        "    unpacked compressed  made by",
        "     2.50 GB    90.0 MB  ADD file in /",
        f"        3 kB       1 kB  {'x' * 85}…",
        "     2.50 GB    90.0 MB  in all",
    ]


@pytest.mark.parametrize(("size", "text"), [(0, "0 kB"), (1500, "2 kB"), (1_500_000, "1.5 MB"), (5.71e9, "5.71 GB")])
def test_sizes_read_in_decimal_units(size: int, text: str) -> None:
    assert megabytes(size) == text
