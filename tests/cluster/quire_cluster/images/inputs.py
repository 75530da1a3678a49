"""The inputs of an image and its names: the stages of the Dockerfile, the files that they copy, and its arguments.

The tag is a hash of the inputs, so it is known before a build. A build takes a while and the checkout may change
meanwhile, so the build uses a copy, from which the tag is computed too. What is read of a Dockerfile is what ours uses;
anything else fails.
"""

import hashlib
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.base_image import debian_base

_INSTRUCTION: Final = re.compile(r"([A-Z]+)\s+(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    keyword: str
    rest: str  # one line: what continued on further lines is joined

    @property
    def options(self) -> dict[str, str]:
        """Return the `--name=value` options before the arguments; the last one wins."""
        return dict(option[2:].partition("=")[::2] for option in self._options)

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.rest)[len(self._options) :])

    @property
    def mounts(self) -> tuple[dict[str, str], ...]:
        values = [option.removeprefix("--mount=") for option in self._options if option.startswith("--mount=")]
        return tuple(dict(part.partition("=")[::2] for part in value.split(",")) for value in values)

    @property
    def _options(self) -> tuple[str, ...]:
        words = self.rest.split()
        return tuple(words[: next((n for n, word in enumerate(words) if not word.startswith("--")), len(words))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    @property
    def takes_from(self) -> tuple[str, ...]:
        """Return the stages or images whose files it copies or mounts."""
        copied = [found for each in self._of("COPY") if (found := each.options.get("from"))]
        mounted = [mount["from"] for each in self._of("RUN") for mount in each.mounts if "from" in mount]
        return (*copied, *mounted)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the files and folders of the build context that it reads."""
        assert not self._of("ADD"), f"stage {self.name}: ADD is not understood here; COPY does the same for files"
        copied = [path for each in self._of("COPY") if "from" not in each.options for path in each.arguments[:-1]]
        mounted = [
            mount.get("source", ".")
            for each in self._of("RUN")
            for mount in each.mounts
            if mount.get("type", "bind") == "bind" and "from" not in mount
        ]
        return (*copied, *mounted)

    @property
    def build_arguments(self) -> tuple[str, ...]:
        return tuple(each.rest.partition("=")[0] for each in self._of("ARG"))

    def _of(self, keyword: str) -> tuple[Instruction, ...]:
        return tuple(each for each in self.instructions if each.keyword == keyword)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    defaults: tuple[Instruction, ...]  # ARG before the first stage
    stages: tuple[Stage, ...]

    def needed(self, target: str) -> tuple[Stage, ...]:
        """Return the stages that a target needs, with the target last."""
        known = {stage.name: stage for stage in self.stages}
        wanted, open_names = set[str](), [target]
        while open_names:
            name = open_names.pop()
            if name in known and name not in wanted:
                wanted.add(name)
                open_names += [known[name].base, *known[name].takes_from]
        return tuple(stage for stage in self.stages if stage.name in wanted)


def parse(text: str) -> Dockerfile:
    instructions = list(_instructions(text))
    starts = [number for number, each in enumerate(instructions) if each.keyword == "FROM"]
    stages = [_stage(instructions[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return Dockerfile(defaults=tuple(instructions[: starts[0]]), stages=tuple(stages))


def _stage(instructions: Sequence[Instruction]) -> Stage:
    base, _, name = instructions[0].arguments
    return Stage(name=name, base=base, instructions=tuple(instructions[1:]))


def _instructions(text: str) -> Iterator[Instruction]:
    for line in _whole_lines(text.splitlines()):
        found = _INSTRUCTION.fullmatch(line)
        assert found is not None, f"no instruction: {line}"
        yield Instruction(keyword=found[1], rest=found[2])


def _whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Join continued lines, which may have comments in between."""
    whole = ""
    for line in lines:
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        whole += stripped.removesuffix("\\").strip() + " "
        if not stripped.endswith("\\"):
            yield whole.strip()
            whole = ""


DOCKERFILE: Final = "Dockerfile"
DOCKERIGNORE: Final = ".dockerignore"


def context_files(context: Path, stages: Iterable[Stage]) -> tuple[Path, ...]:
    """Return the files in a fixed order."""
    ignored = ignored_names((context / DOCKERIGNORE).read_text())
    found = set[Path]()
    for source in {source for stage in stages for source in stage.sources}:
        path = context / source
        for each in (path,) if path.is_file() else path.rglob("*"):
            parts = each.relative_to(context).parts
            if each.is_file() and not any(fnmatchcase(part, name) for part in parts for name in ignored):
                found.add(each)
    return tuple(sorted(found))


def ignored_names(dockerignore: str) -> tuple[str, ...]:
    """Return the names that are excluded everywhere: the patterns `**/NAME`."""
    return tuple(line.removeprefix("**/") for line in dockerignore.splitlines() if line.startswith("**/"))


def copy_context(context: Path, into: Path) -> None:
    """Copy the input files of all targets."""
    stages = parse((context / DOCKERFILE).read_text()).stages
    for path in (context / DOCKERFILE, context / DOCKERIGNORE, *context_files(context, stages)):
        copy = into / path.relative_to(context)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


TARGETS: Final = ("gateway", "operator", "engine")  # the quick ones first
# In every base image, so that a mount there leaves nothing behind.
WHEEL_FOLDER: Final = "/mnt"
CACHE_FOLDER: Final = "/media"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `make images`."""

    base_image: str | None = None  # None: made of Debian's packages
    torch_spec: str = ""  # README, "A smaller torch"; empty: the lock's
    compiler: str = ""  # Debian packages; the test cluster's nodes have no GPU

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "BuildOptions":
        return cls(
            base_image=environment.get("BASE_IMAGE") or None,
            torch_spec=environment.get("TORCH_SPEC", ""),
            compiler=environment.get("COMPILER", ""),
        )

    @property
    def arguments(self) -> dict[str, str]:
        """Return the arguments of the Dockerfile; a wheel is named as mounted."""
        wheel = self.torch_wheel
        return {
            "BASE_IMAGE": self.base_image or debian_base(),
            "TORCH_SPEC": self.torch_spec if wheel is None else f"{WHEEL_FOLDER}/{wheel.name}",
            "COMPILER": self.compiler,
        }

    @property
    def torch_wheel(self) -> Path | None:
        """Return the path of torch's wheel if it is a file on this machine."""
        path = Path(self.torch_spec)
        if path.suffix != ".whl" or "://" in self.torch_spec:
            return None
        if not path.is_file():
            raise ImageBuildFailed(f"TORCH_SPEC is {self.torch_spec}, and there is no such file")
        return path.absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    registry: str
    repository: str
    tag: str

    @property
    def reference(self) -> str:
        return f"{self.registry}/{self.repository}:{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    engine: Image
    operator: Image
    gateway: Image

    def chart_values(self) -> dict[str, Any]:
        """Return the chart's value `images`."""
        each = {name: {"repository": image.repository, "tag": image.tag} for name, image in self.by_target().items()}
        return {"images": {"registry": self.engine.registry, **each}}

    def by_target(self) -> dict[str, Image]:
        return {"engine": self.engine, "operator": self.operator, "gateway": self.gateway}


_TAG_LENGTH: Final = 12


def fingerprint(context: Path, dockerfile: Dockerfile, target: str, arguments: Mapping[str, str]) -> str:
    stages = dockerfile.needed(target)
    digest = hashlib.sha256()
    for part in (*_recipe(dockerfile, stages), *_taken(dockerfile, stages, arguments)):
        _add(digest, part.encode())
    for path in context_files(context, stages):
        executable = path.stat().st_mode & 0o111
        _add(digest, f"{path.relative_to(context)} {bool(executable)}".encode())
        _add(digest, path.read_bytes())
    return digest.hexdigest()[:_TAG_LENGTH]


def _recipe(dockerfile: Dockerfile, stages: Iterable[Stage]) -> Iterator[str]:
    for default in dockerfile.defaults:
        yield default.rest
    for stage in stages:
        yield f"{stage.name} {stage.base}"
        for instruction in stage.instructions:
            yield f"{instruction.keyword} {instruction.rest}"


def _taken(dockerfile: Dockerfile, stages: Iterable[Stage], arguments: Mapping[str, str]) -> Iterator[str]:
    names = {default.rest.partition("=")[0] for default in dockerfile.defaults}
    names.update(name for stage in stages for name in stage.build_arguments)
    for name in sorted(names & arguments.keys()):
        yield f"{name}={arguments[name]}"


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Add a part with its length, so that different lists of parts differ."""
    digest.update(f"{len(part)} ".encode())
    digest.update(part)
