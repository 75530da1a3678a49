"""LLMDeployments and LLMAdapters from a YAML file, or every problem in it."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from quire_cli.errors import FileProblem, SpecProblem
from quire_operator.api import AdapterSpec, Invalid, Spec, names

_MAX_BYTES = 2**20


class _Loader(yaml.SafeLoader):
    """The safe loader, except that a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f'"{key.value}" is a duplicate key', problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """An LLMDeployment of a file, with its status if ``kubectl get -o yaml`` wrote the file."""

    spec: Spec
    status: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """The content of a file, in its order."""

    documents: tuple[Document, ...]
    adapters: tuple[AdapterSpec, ...]

    @property
    def deployments(self) -> tuple[Spec, ...]:
        return tuple(document.spec for document in self.documents)


def read_manifests(file: Path) -> Manifests:
    """Return everything in a file; raise FileProblem or SpecProblem."""
    documents = _parse(file, _read(file))
    parsed = [_parsed(body) for body in documents]
    problems = [
        f"{_prefix(index, invalid, len(parsed))}{problem}"
        for index, invalid in enumerate(parsed)
        if isinstance(invalid, Invalid)
        for problem in invalid.problems
    ]
    specs = tuple(spec for spec in parsed if isinstance(spec, Spec))
    adapters = tuple(spec for spec in parsed if isinstance(spec, AdapterSpec))
    problems += _clashes(specs)
    if not problems:
        problems += _adapter_problems(specs, adapters)
    if problems:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SpecProblem(f"{file}: {count}", details=problems)
    if not specs:
        raise FileProblem(f"{file} contains no LLMDeployment", hint="LLMAdapters need one; see examples/demo.yaml")
    return Manifests(
        documents=tuple(
            Document(spec=spec, status=_status(body))
            for spec, body in zip(parsed, documents, strict=True)
            if isinstance(spec, Spec)
        ),
        adapters=adapters,
    )


def _parsed(body: object) -> Spec | AdapterSpec | Invalid:
    if isinstance(body, Mapping) and body.get("kind") == names.ADAPTER_KIND:
        return AdapterSpec.parse(body)
    return Spec.parse(body)  # type: ignore[arg-type]


def _adapter_problems(specs: Sequence[Spec], adapters: Sequence[AdapterSpec]) -> list[str]:
    """Return the problems of LLMAdapters with the LLMDeployments of the file, and with each other."""
    found: list[str] = []
    by_name = {spec.name: spec for spec in specs}
    served = {spec.model.served_name: f"LLMDeployment {spec.name}" for spec in specs}
    for adapter in adapters:
        where, deployment = f"LLMAdapter {adapter.name}: spec", by_name.get(adapter.deployment)
        if deployment is None:
            known = ", ".join(by_name)
            found.append(
                f"{where}.deploymentRef.name: the file has no LLMDeployment {adapter.deployment}; it has {known}"
            )
        elif deployment.engine.adapters is None:
            found.append(
                f"{where}.deploymentRef.name: {deployment.name} has no room for adapters; set its "
                "spec.engine.adapters, for example to {maxRank: 16}"
            )
        if (holder := served.get(adapter.served_name)) is not None:
            found.append(
                f"{where}.servedName: {holder} is served as {adapter.served_name} already; choose another name"
            )
        served.setdefault(adapter.served_name, f"LLMAdapter {adapter.name}")
    return found


def _status(body: object) -> Mapping[str, object]:
    status = body.get("status") if isinstance(body, Mapping) else None
    return status if isinstance(status, Mapping) else {}


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise FileProblem(
            f"{file} does not exist", hint="-f expects a YAML file with an LLMDeployment, such as examples/demo.yaml"
        ) from None
    except IsADirectoryError:
        raise FileProblem(f"{file} is a folder", hint="-f expects one YAML file") from None
    except OSError as error:
        raise FileProblem(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise FileProblem(f"{file} is not an LLMDeployment: it has more than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileProblem(f"{file} is not UTF-8 text: invalid byte at position {error.start}") from error


def _parse(file: Path, text: str) -> list[object]:
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        excerpt = mark.get_snippet(indent=0, max_length=100) if mark else None
        details = excerpt.splitlines() if excerpt else []
        raise FileProblem(f"{file} is not YAML{where}: {error.problem or error.context}", details=details) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileProblem(f"{file} is not YAML: {reason}") from error
    if not documents:
        raise FileProblem(f"{file} contains no document", hint="write an LLMDeployment; see examples/demo.yaml")
    return documents


def _prefix(index: int, invalid: Invalid, count: int) -> str:
    if count == 1:
        return ""
    return f"document {index + 1} ({invalid.name}): " if invalid.name else f"document {index + 1}: "


def _clashes(specs: Sequence[Spec]) -> list[str]:
    """Return the problems of names that several documents share."""
    names = Counter(spec.name for spec in specs)
    served = Counter(spec.model.served_name for spec in specs)
    return [f"metadata.name: {name} is the name of {count} documents" for name, count in names.items() if count > 1] + [
        f"spec.model.servedName: {name} is served by {count} documents, but a request names only one"
        for name, count in served.items()
        if count > 1 and names.get(name, 0) <= 1
    ]
