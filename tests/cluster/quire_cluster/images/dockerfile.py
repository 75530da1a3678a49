"""The inputs of one target of a Dockerfile: its stages, the files it copies, and its arguments.

The tag of an image can thus be computed before a build. Pure: it parses text. It supports what our Dockerfile uses and
asserts that nothing else occurs.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
