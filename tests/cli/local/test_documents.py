"""A YAML file becomes specs, or one screen with all errors and their paths."""

from pathlib import Path

import pytest

from quire_cli.errors import FileProblem, SpecProblem
from quire_cli.local.deployment import write_adapters
from quire_cli.local.documents import read_manifests
from quire_common.contract.adapters_file import Placement, parse_adapters

GOOD = """\
apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {name: %s}
spec: {model: {source: "file://./m"%s}}
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "f.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_several_documents_in_one_file(tmp_path: Path) -> None:
    text = "---\n" + GOOD % ("chat", "") + "---\n" + GOOD % ("code", "") + "---\n"
    assert [spec.name for spec in read_manifests(write(tmp_path, text)).deployments] == ["chat", "code"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(example: Path) -> None:
    assert read_manifests(example)


def test_merge_keys_and_anchors_are_supported(tmp_path: Path) -> None:
    text = GOOD % ("chat", "") + "  # comment\n"
    text = text.replace("spec: {", "spec: &s {") + "---\n" + "\n".join((GOOD % ("code", "")).splitlines()[:3])
    text += '\nspec: {<<: &base {replicas: 2}, model: {source: "file://./m"}, replicas: 3}\n'
    assert [spec.replicas for spec in read_manifests(write(tmp_path, text)).deployments] == [1, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no document"),
        ("---\n---\n", "contains no document"),
        ("a: [", "is not YAML, line 1"),
        ("a: 1\na: 2\n", r'is not YAML, line 2, column 1: "a" is a duplicate key'),
        ("a: !!python/object:os.system {}", "is not YAML, line 1"),
        ("a: \t- b\n\tc", "is not YAML, line"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        ("a: &a [*a]\n", "problems"),
        ("[" * 5000, "is not YAML"),
        ("x" * 2_000_000, "more than 1048576 bytes"),
        ("a: 2024-99-99\n", "is not YAML"),
    ],
)
def test_invalid_yaml_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises((FileProblem, SpecProblem), match=message):
        read_manifests(write(tmp_path, text))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="nowhere.yaml does not exist"):
        read_manifests(tmp_path / "nowhere.yaml")
    with pytest.raises(FileProblem, match="is a folder"):
        read_manifests(tmp_path)


def test_problems_name_their_document(tmp_path: Path) -> None:
    text = GOOD % ("chat", "") + "---\n" + GOOD % ("code", ", nope: 1") + "---\njust text\n"
    with pytest.raises(SpecProblem, match="problems") as caught:
        read_manifests(write(tmp_path, text))
    assert caught.value.details[0].startswith("document 2 (code): spec.model.nope: unknown field")
    assert caught.value.details[1] == 'document 3: must be a mapping, got "just text"'


def test_two_documents_cannot_share_a_name_or_a_served_name(tmp_path: Path) -> None:
    with pytest.raises(SpecProblem) as caught:
        read_manifests(write(tmp_path, (GOOD % ("chat", "")) + "---\n" + GOOD % ("chat", "")))
    assert caught.value.details == ("metadata.name: chat is the name of 2 documents",)
    with pytest.raises(SpecProblem) as caught:
        read_manifests(write(tmp_path, (GOOD % ("chat", "")) + "---\n" + GOOD % ("code", ", servedName: chat")))
    assert caught.value.details[0].startswith("spec.model.servedName: chat is served by 2 documents")


ROOM = ", engine: {adapters: {maxRank: 8}}"
ADAPTER = """\
---
apiVersion: quire.dev/v1alpha1
kind: LLMAdapter
metadata: {name: %s}
spec: {deploymentRef: {name: chat}, source: "%s"%s}
"""


def with_room(text: str) -> str:
    return text.replace('source: "file://./m"}', 'source: "file://./m"}' + ROOM)


def test_adapters_are_read_with_their_deployment(tmp_path: Path) -> None:
    text = with_room(GOOD % ("chat", "")) + ADAPTER % ("legal", "file://./a", "") + ADAPTER % ("far", "hf://o/a", "")
    file = write(
        tmp_path, text + ADAPTER.replace("spec: {", "spec: {placement: OnDemand, ") % ("late", "s3://bucket/a", "")
    )
    found = read_manifests(file)
    assert ([spec.name for spec in found.deployments], len(found.adapters)) == (["chat"], 3)
    write_adapters(tmp_path / "list.json", found.adapters, base=tmp_path)
    entries, problems = parse_adapters((tmp_path / "list.json").read_text())
    assert problems == []
    assert [(entry.name, entry.source, entry.placement) for entry in entries] == [
        ("far", "hf://o/a@main", Placement.ALL),
        ("late", "s3://bucket/a", Placement.ON_DEMAND),
        ("legal", str(tmp_path / "a"), Placement.ALL),
    ]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (ADAPTER.replace("name: chat", "name: code") % ("a", "hf://o/a", ""), "has no LLMDeployment code; it has chat"),
        (ADAPTER % ("a", "hf://o/a", ", servedName: chat"), "LLMDeployment chat is served as chat already"),
        (ADAPTER % ("a", "hf://o/a", "") + ADAPTER % ("b", "hf://o/b", ", servedName: a"), "LLMAdapter a is served as"),
        (ADAPTER % ("a", "pvc://disk/a", ""), "claim of the model"),
    ],
)
def test_problems_of_adapters_in_a_file(tmp_path: Path, adapters: str, message: str) -> None:
    with pytest.raises(SpecProblem) as caught:
        read_manifests(write(tmp_path, with_room(GOOD % ("chat", "")) + adapters))
    (detail,) = caught.value.details
    assert message in detail


def test_adapters_need_slots_in_the_deployment(tmp_path: Path) -> None:
    with pytest.raises(SpecProblem) as caught:
        read_manifests(write(tmp_path, GOOD % ("chat", "") + ADAPTER % ("a", "hf://o/a", "")))
    assert "chat has no room for adapters" in caught.value.details[0]


def test_file_with_only_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises((FileProblem, SpecProblem), match="."):
        read_manifests(write(tmp_path, ADAPTER % ("a", "hf://o/a", "")))
