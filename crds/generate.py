"""Generate what follows from the fields of LLMDeployment and LLMAdapter: CRDs, their copies in the chart, and docs.

The source is quire_operator.api. Names, columns and status of a CRD are written by hand in crds/*.yaml.

python crds/generate.py          write the files
python crds/generate.py --check  exit with status 1 if one is out of date
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quire_operator.api import AdapterSpec, Spec
from quire_operator.api.schema import section_schema

ROOT = Path(__file__).parents[1]
INTRODUCTION = """\
# {kind}

<!-- Generated from quire_operator.api and crds/{plural}.yaml by `make generate`. -->

API version `{api}`, kind `{kind}`, short name `{short}`. `kubectl explain {plural}.spec` shows the same descriptions.

A minimal {kind}:

```yaml
apiVersion: {api}
kind: {kind}
metadata:
{example}
```
"""
BEFORE = """\
            spec:
              # Generated from operator/src/quire_operator/api by `make generate`: edit there.
"""
AFTER = """\
            status:
              # Written by hand.
"""
NUMBERS = {"int32", "int64"}
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of resource, and what is generated from it."""

    plural: str
    section: type
    page: str
    example: str
    """The rest of a minimal object, after ``metadata:``."""

    @property
    def crd(self) -> Path:
        return Path(__file__).with_name(f"{self.plural}.yaml")


KINDS = (
    Kind(
        plural="llmdeployments",
        section=Spec,
        page="crd.md",
        example="  name: chat\nspec:\n  model:\n    source: hf://HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    Kind(
        plural="llmadapters",
        section=AdapterSpec,
        page="llmadapter.md",
        example="  name: chat-legal\nspec:\n  deploymentRef:\n    name: chat\n  source: s3://adapters/legal",
    ),
)


def main() -> None:
    stale = {path: text for path, text in outputs().items() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv:
        sys.exit("".join(f"{path.relative_to(ROOT)} is out of date: run `make generate`\n" for path in stale) or 0)
    for path, text in stale.items():
        path.write_text(text)


def outputs() -> dict[Path, str]:
    """Return the content of each generated file."""
    found: dict[Path, str] = {}
    for kind in KINDS:
        crd = with_spec(kind.crd.read_text(), kind.section)
        found[kind.crd] = crd
        found[ROOT / f"charts/quire/templates/crds/{kind.plural}.yaml"] = chart_template(crd, kind)
        found[ROOT / "docs" / kind.page] = reference(yaml.safe_load(crd), kind)
    return found


def with_spec(crd: str, section: type) -> str:
    """Return the text of a CRD with the current schema of `spec`: the part between two properties of the root."""
    head, _ = crd.split(BEFORE)
    _, tail = crd.split(AFTER)
    schema = {"description": "Desired state.", **section_schema(section)}
    text = yaml.dump(schema, Dumper=Dumper, width=100, sort_keys=False, allow_unicode=True)
    return head + BEFORE + textwrap.indent(text, " " * 14) + AFTER + tail


class Dumper(yaml.SafeDumper):
    """A writer of YAML without anchors, with indented lists and with long texts in folded blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">" if len(text) > 80 else None)


Dumper.add_representer(str, text_node)


def chart_template(crd: str, kind: Kind) -> str:
    """Return the chart's copy, which can be switched off and stays when the release is uninstalled."""
    name = f"\n  name: {kind.plural}.quire.dev\n"
    keep = f"{name}  annotations:\n    helm.sh/resource-policy: keep\n"
    note = f"{{{{- /* Generated from crds/{kind.plural}.yaml by `make generate`. */ -}}}}\n"
    return f"{note}{{{{- if .Values.crds.create }}}}\n{crd.replace(name, keep, 1)}{{{{- end }}}}\n"


def reference(crd: Schema, kind: Kind) -> str:
    """Return the whole page."""
    spec, (version,) = crd["spec"], crd["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]
    words = {"api": f"{spec['group']}/{version['name']}", **spec["names"], "short": spec["names"]["shortNames"][0]}
    parts = [INTRODUCTION.format(**words, example=kind.example)]
    parts.append(columns(version["additionalPrinterColumns"], words["short"]))
    for name in ("spec", "status"):
        parts += sections(name, root["properties"][name])
    return "\n".join(parts)


def columns(printed: list[Schema], short: str) -> str:
    """Return the table of the columns that `kubectl get` prints."""
    rows = [
        f"| {column['name']} | {column.get('description', '')} | {'-o wide' if column.get('priority') else ''} |"
        for column in printed
    ]
    return "\n".join(
        [
            f"## Columns of `kubectl get {short}`",
            "",
            "| column | description | shown with |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def sections(path: str, schema: Schema) -> Iterator[str]:
    """Yield one section per object, outermost first."""
    level = "##" if "." not in path else "###"
    lines = [f"{level} {path}", "", schema["description"].strip(), ""]
    lines += [f"- {rule}" for rule in rules(schema)] + ([""] if rules(schema) else [])
    lines += ["| field | type | default | description |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for name, child in schema["properties"].items():
        lines.append(row(f"{path}.{name}", child, is_required=name in required))
    yield "\n".join([*lines, ""])
    for name, child in schema["properties"].items():
        inner = child.get("items", child)
        if "properties" in inner:
            yield from sections(f"{path}.{name}{'[]' if 'items' in child else ''}", inner)


def row(path: str, schema: Schema, *, is_required: bool) -> str:
    """Return the table row of one field. The section of an object has its rules and its whole description."""
    inner = schema.get("items", schema)
    description = schema["description"].strip()
    said = [first_sentence(description) if "properties" in schema else description, *bounds(schema)]
    if "properties" not in inner:
        said += [f"{sentence(rule)}." for rule in dict.fromkeys((*rules(schema), *rules(inner)))]
    default = "**required**" if is_required else shown_default(schema)
    kind = shown_type(schema)
    if "properties" in inner:
        kind = f"[{kind}](#{path.replace('.', '').replace('[]', '').lower()})"
    return f"| `{path.rpartition('.')[2]}` | {kind} | {default} | {escaped(' '.join(said))} |"


def first_sentence(text: str) -> str:
    """Return a text up to the first full stop that a space and a capital letter follow."""
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def sentence(rule: str) -> str:
    """Return a rule with a capital letter, or as a quoted name if it begins with one, such as nvidia.com/gpu."""
    name, _, rest = rule.partition(" ")
    return f"`{name}` {rest}" if "/" in name else f"{rule[0].upper()}{rule[1:]}"


def rules(schema: Schema) -> list[str]:
    """Return the messages of the CEL rules, except for the syntax of quantities and for removed fields."""
    if schema.get("x-kubernetes-int-or-string") or schema.get("description", "").startswith("Removed:"):
        return []
    return [
        f"{rule['fieldPath'].removeprefix('.')}: {rule['message']}" if "fieldPath" in rule else rule["message"]
        for rule in schema.get("x-kubernetes-validations", ())
    ]


def bounds(schema: Schema) -> Iterator[str]:
    """Yield the bounds of a number, except for a maximum of 2^31 - 1."""
    least, most = schema.get("minimum"), schema.get("maximum")
    if most is not None and most < 2**31 - 1:
        yield f"From {least} to {most}." if least is not None else f"At most {most}."
    elif least:
        yield f"At least {least}."


def shown_type(schema: Schema) -> str:
    if "enum" in schema:
        rules = {rule["rule"] for rule in schema.get("x-kubernetes-validations", ())}
        words = [value for value in schema["enum"] if f"self != '{value}'" not in rules]  # without removed ones
        return " \\| ".join(f"`{value}`" for value in words)
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "items" in schema:
        return f"list of {shown_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map to {shown_type(schema['additionalProperties'])}"
    return "integer" if schema.get("format") in NUMBERS else str(schema.get("format", schema["type"]))


def shown_default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value in (None, {}) else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
