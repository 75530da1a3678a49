"""An LLMAdapter as values: ``AdapterSpec.parse(body) -> AdapterSpec | Invalid``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_common.contract.adapters_file import Placement
from quire_common.model_source import ClaimSource, ImageSource, Source
from quire_common.names import object_name_problem
from quire_operator.api import names
from quire_operator.api.deployment import Invalid, read_head
from quire_operator.api.field_kinds import Choice, ObjectName
from quire_operator.api.fields import Fields
from quire_operator.api.model import ADAPTER_SOURCE_RULES, ModelSource, ServedName
from quire_operator.api.schema import Rule, Section, read_section

_ON_A_CLAIM = (
    "an adapter cannot bring a claim into running replicas: put it on the claim of the model and use file://./folder"
)
_IN_AN_IMAGE = (
    "an adapter cannot bring an image into running replicas: put it into the image of the model and use "
    "file://./folder, or use hf:// or s3://"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReference:
    name: str = ObjectName("Name of an LLMDeployment in this namespace, which has spec.engine.adapters.").required()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One LLMAdapter with its defaults filled in."""

    name: str
    namespace: str
    deployment_ref: DeploymentReference = Section(
        "The LLMDeployment whose replicas serve the adapter.",
        rules=(
            Rule(
                cel="self == oldSelf",
                message="cannot be changed: delete this LLMAdapter and create it for the other LLMDeployment",
            ),
        ),
    ).required()
    source: Source = ModelSource(
        "Location of the adapter in PEFT's layout (adapter_config.json and safetensors): hf://org/name@revision "
        "(Hugging Face Hub), s3://bucket/path (optionally with ?region= and &endpoint=), "
        "file:///path (a folder in the container) or file://./dir (relative to /models in pods, and relative to "
        "the manifest with `quire up`). pvc:// and oci:// are not possible, because a running pod cannot mount "
        "another volume.",
        max_length=1024,
        example='"hf://org/name@revision", "s3://bucket/path" or "file://./folder"',
        rules=ADAPTER_SOURCE_RULES,
    ).required()
    served_name: str = ServedName(
        "Model name that clients send in the `model` field of a request for this adapter. Default is "
        "metadata.name. If LLMDeployments or LLMAdapters behind one gateway use the same name, the oldest receives "
        "the requests."
    ).default("")
    placement: Placement = Choice(
        "When replicas download the adapter. All: as soon as it is listed. OnDemand: each replica at its first "
        "request for it, which waits for the download."
    ).default(Placement.ALL)

    @property
    def deployment(self) -> str:
        return self.deployment_ref.name

    def check(self, document: Fields) -> None:
        """Note a source that running replicas cannot reach."""
        if isinstance(self.source, ClaimSource):
            document.problem("source", _ON_A_CLAIM)
        if isinstance(self.source, ImageSource):
            document.problem("source", _IN_AN_IMAGE)

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> "AdapterSpec | Invalid":
        """Return the spec of a whole object (apiVersion, kind, metadata, spec), or its problems. It never raises."""
        root, name, namespace = read_head(body, kind=names.ADAPTER_KIND, name_problem=object_name_problem)
        spec: AdapterSpec | None = None
        if root.has("spec"):
            spec = read_section(cls, root.section("spec"), name=name or "unnamed", namespace=namespace)
            spec = replace(spec, served_name=spec.served_name or spec.name)
        root.done()
        if root.problems or spec is None:
            return Invalid(name=name, namespace=namespace, problems=tuple(root.problems))
        return spec
