"""spec.model and spec.engine.speculation: where the models of a replica come from, and how they are kept."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from quire_common.model_source import EXAMPLES, ClaimSource, FileSource, ImageSource, Source, expected, parse_source
from quire_operator.api.field_kinds import Boolean, ByteSize, Choice, Integer, ObjectName, SecretReference, Text
from quire_operator.api.fields import Fields, shown
from quire_operator.api.schema import Rule, Section

_DOWNLOADED_FORMS = (
    r"self.matches('^hf://[A-Za-z0-9][\\w.-]*(/[A-Za-z0-9][\\w.-]*)?(@[A-Za-z0-9][\\w./-]*)?$') "
    r"|| self.matches('^file://(/|\\.\\.?/).*[^/].*$') "
    "|| self.matches('^s3://')"
)
_MOUNTED_FORMS = "self.matches('^oci://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$')"
_FORM_RULE = Rule(
    cel=f"{_DOWNLOADED_FORMS} || {_MOUNTED_FORMS}",
    message='must be "hf://org/name@revision", "s3://bucket/path", "oci://registry/name:tag", '
    '"pvc://claim/path", "file:///folder" or "file://./folder"',
)
_BUCKET_RULE = Rule(
    cel="!self.startsWith('s3://') || self.matches('^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[^?]*)?' "
    "+ '([?](region|endpoint)=[^&]+(&(region|endpoint)=[^&]+)?)?$')",
    message='a bucket must be "s3://bucket/path", optionally followed by ?region=… and &endpoint=https://…',
)
SOURCE_RULES = (
    _FORM_RULE,
    _BUCKET_RULE,
    Rule(
        cel="!self.startsWith('oci://') || self.matches('^oci://(localhost' "
        "+ '|[A-Za-z0-9-]+([.][A-Za-z0-9-]+)+(:[0-9]+)?|[A-Za-z0-9-]+:[0-9]+)/[a-z0-9][a-z0-9._/-]*' "
        r"+ '(:\\w[\\w.-]*|(:\\w[\\w.-]*)?@sha256:[0-9a-f]{64})(/.*)?$')",
        message="an image must contain a registry, a name and a tag or digest, such as "
        '"oci://registry.example/org/model:1"; append /path if the model is in a folder of the image',
    ),
)
"""The forms that ``ModelSource`` reads, for the API server."""
ADAPTER_SOURCE_RULES = (
    Rule(
        cel=_DOWNLOADED_FORMS,
        message='must be "hf://org/name@revision", "s3://bucket/path", "file:///folder" or "file://./folder"',
    ),
    _BUCKET_RULE,
)
"""The same for adapters, which a running pod cannot mount."""
_SERVED_NAME = re.compile(r"[A-Za-z0-9]([\w./:-]{0,126}[A-Za-z0-9])?", re.ASCII)
_MAX_SERVED_NAME = 128


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class Retention(StrEnum):
    """The fate of a claim when its LLMDeployment is deleted."""

    DELETE = "Delete"
    RETAIN = "Retain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(Text):
    """A string that names where the weights are, read as a ``Source``."""

    @property
    def placeholder(self) -> Any:
        return FileSource(path="/", relative=False)

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        text = Text.read(self, document, name, value_type, None)
        source = None if text is None else parse_source(text)
        if text is not None and source is None:
            document.problem(name, f"must be {expected(text)}, got {shown(text)}")
        return source or default


def _served_name_problem(name: str) -> str | None:
    if _SERVED_NAME.fullmatch(name):
        return None
    return (
        f"must start and end with a letter or digit and contain at most {_MAX_SERVED_NAME} letters, digits and '-', "
        "'_', '.', ':' or '/'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedName(Text):
    """A model name that clients send, of an LLMDeployment or an LLMAdapter."""

    max_length: int = _MAX_SERVED_NAME
    check: Callable[[str], str | None] | None = _served_name_problem
    rules: tuple[Rule, ...] = (
        Rule(
            cel=r"self.matches('^[A-Za-z0-9]([\\w./:-]*[A-Za-z0-9])?$')",
            message="must start and end with a letter or digit and contain only letters, digits and '-', '_', '.', ':' "
            "or '/'",
        ),
    )


def _only_with_size(name: str) -> Callable[[object, Fields], bool]:
    return lambda cache, document: not document.has(name) or document.has("size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """The claim that keeps downloads: an existing one, or one that is created for this deployment with a size."""

    claim_name: str | None = ObjectName("Name of an existing PersistentVolumeClaim in this namespace.").default(None)
    size_bytes: int | None = ByteSize("Size of a claim that quire creates, such as 50Gi.").default(None)
    storage_class_name: str | None = ObjectName(
        "Storage class of the claim that quire creates. Default is the cluster's default class."
    ).default(None)
    access_mode: AccessMode = Choice(
        "Access mode of the claim that quire creates. ReadWriteMany allows several nodes, if the storage class "
        "supports it. With ReadWriteOnce (default), only one node mounts the claim. More than one replica and "
        "strategy Canary are then refused, and a rollout stops the old replica first, unless "
        "spec.podTemplate.spec.nodeSelector has kubernetes.io/hostname.",
        is_default_stored=False,
    ).default(AccessMode.READ_WRITE_ONCE)
    retain: Retention = Choice(
        "What happens to the claim that quire creates when the LLMDeployment is deleted. Delete (default) deletes "
        "it. Retain keeps it; an LLMDeployment of the same name uses it again. Retain also keeps it if "
        "spec.model.cache is removed.",
        is_default_stored=False,
    ).default(Retention.DELETE)

    RULES: ClassVar = (
        Rule(
            cel="has(self.claimName) != has(self.size)",
            holds=lambda cache, document: document.has("claimName") != document.has("size"),
            message="set exactly one of claimName (an existing claim) and size (a claim that quire creates)",
        ),
        *(
            Rule(
                at=name,
                cel=f"!has(self.{name}) || has(self.size)",
                holds=_only_with_size(name),
                message="applies only to a claim that quire creates: set size, or remove this field",
            )
            for name in ("storageClassName", "accessMode", "retain")
        ),
    )

    @property
    def is_created(self) -> bool:
        return self.size_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    source: Source = ModelSource(
        "Location of the weights: hf://org/name@revision (Hugging Face Hub), s3://bucket/path (optionally with "
        "?region= and &endpoint=), oci://registry/name:tag/path (an image that the kubelet mounts, and the path of "
        "a folder inside it), pvc://claim/path, file:///path (a folder in the container) or file://./dir (relative "
        "to /models in pods, and relative to the manifest with `quire up`).",
        max_length=1024,
        example=EXAMPLES,
        flags=("model", "revision"),
        rules=SOURCE_RULES,
    ).required()
    served_name: str = ServedName(
        "Model name that clients send in the `model` field of a request. Default is metadata.name. If several "
        "LLMDeployments behind one gateway use the same name, the oldest receives the requests.",
        flags=("served-model-name",),
    ).default("")
    credentials_secret: str | None = SecretReference(
        "Secret in this namespace with the credentials for the source. hf:// reads the key `token`. s3:// reads "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally AWS_SESSION_TOKEN, AWS_REGION and "
        "AWS_ENDPOINT_URL. oci:// needs a pull secret of type kubernetes.io/dockerconfigjson. Without a secret, "
        "the pod's own identity is used.",
        secret="Name of the secret.",
    ).default(None)
    cache: ModelCache | None = Section(
        "Volume that stores downloaded weights, so that each claim is filled only once. Without it, each pod "
        "downloads the weights itself; nodes keep the images of oci://.",
        flags=("download-dir",),
    ).default(None)

    RULES: ClassVar = (
        Rule(
            at="cache",
            cel="!has(self.cache) || !self.source.startsWith('oci://')",
            holds=lambda model, document: model.cache is None or not isinstance(model.source, ImageSource),
            message="does not apply to oci://: the kubelet mounts the image, and nodes keep it. Remove cache, or use "
            "hf:// or s3://",
        ),
    )


class SpeculationMethod(StrEnum):
    NGRAM = "NGram"
    DRAFT_MODEL = "DraftModel"

    @property
    def needs_draft(self) -> bool:
        """Return whether the method reads the weights of ``draft``."""
        return self is not SpeculationMethod.NGRAM


_ENGINE_METHODS = {SpeculationMethod.NGRAM: "ngram", SpeculationMethod.DRAFT_MODEL: "draft_model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Choice):
    """A method, which the engine has under another word."""

    def arguments(self, value: Any) -> list[str]:
        return [f"--{self.flags[0]}", _ENGINE_METHODS[value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The draft model; ``engine_args`` gets its path from the pod or from ``quire up``."""

    source: Source = ModelSource(
        "Location of the draft model: a smaller model with the same tokenizer and vocabulary as spec.model and at "
        "least the same context. The forms are those of spec.model.source. Downloads share the volume of "
        "spec.model if it takes downloads, else each pod has a volume of its own.",
        max_length=1024,
        example=EXAMPLES,
        flags=("spec-model",),
        rules=SOURCE_RULES,
    ).required()
    credentials_secret: str | None = SecretReference(
        "Secret in this namespace with the credentials for the source. Its keys are those of "
        "spec.model.credentials, which is not used for the draft model.",
        secret="Name of the secret.",
    ).default(None)


def _only_with_draft(name: str) -> Callable[["Speculation", Fields], bool]:
    return lambda speculation, document: speculation.method.needs_draft or not document.has(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: the engine proposes tokens, and verifies several of them in one step."""

    method: SpeculationMethod = Method(
        "Source of the proposed tokens. NGram proposes what followed the most recent tokens where they occurred "
        "before, in the prompt or the answer. DraftModel proposes the tokens of a smaller model (draft).",
        flags=("spec-method", "speculative-config"),
        example="NGram or DraftModel",
        removed={"Eagle": "set method to DraftModel with a smaller model as draft.source, or to NGram"},
    ).required()
    draft: Draft | None = Section(
        "The draft model of method DraftModel. Its weights and its share of the KV cache need memory."
    ).default(None)
    max_tokens: int | None = Integer(
        "Maximum number of proposed tokens of a sequence that one step verifies, less than blockSize. The engine "
        "verifies as many as the measured cost of steps allows. Default is 8.",
        minimum=1,
        maximum=127,
        flags=("spec-tokens",),
    ).default(None)
    required: bool = Boolean(
        "Whether replicas need the draft model. True (default) stops a replica whose draft model cannot be "
        "fetched or used. False lets it serve without speculation.",
        is_default_stored=False,
        flags=("spec-required", "no-spec-required"),
    ).default(True)

    RULES: ClassVar = (
        Rule(
            at="draft",
            cel="self.method == 'NGram' || has(self.draft)",
            holds=lambda speculation, document: not speculation.method.needs_draft or document.has("draft"),
            message="is required with method DraftModel: set draft.source, or set method to NGram",
        ),
        *(
            Rule(
                at=name,
                cel=f"self.method != 'NGram' || !has(self.{name})",
                holds=_only_with_draft(name),
                message="applies only to method DraftModel: remove it, or set method to DraftModel",
            )
            for name in ("draft", "required")
        ),
        Rule(
            at="required",
            cel="!has(self.required) || self.required || !has(self.draft) || !self.draft.source.matches('^(pvc|oci)://')",
            holds=lambda speculation, document: (
                speculation.required
                or speculation.draft is None
                or not isinstance(speculation.draft.source, ClaimSource | ImageSource)
            ),
            message="cannot be false with a draft.source of pvc:// or oci://: no pod starts without its volumes. "
            "Remove required, or use another source",
        ),
    )
