"""``spec.engine.speculation``: the source of the tokens that a replica proposes and verifies several at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from quire_common.model_source import EXAMPLES, ClaimSource, ImageSource, Source
from quire_operator.domain.resource.field_kinds import Boolean, Choice, Integer, SecretReference
from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.model import SOURCE_RULES, ModelSource
from quire_operator.domain.resource.schema import Rule, Section


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

    source: Annotated[
        Source,
        ModelSource(
            "Location of the draft model: a smaller model with the same tokenizer and vocabulary as spec.model and at "
            "least the same context. The forms are those of spec.model.source. Downloads share the volume of "
            "spec.model if it takes downloads, else each pod has a volume of its own.",
            max_length=1024,
            example=EXAMPLES,
            flags=("spec-model",),
            rules=SOURCE_RULES,
        ),
    ]
    credentials_secret: Annotated[
        str | None,
        SecretReference(
            "Secret in this namespace with the credentials for the source. Its keys are those of "
            "spec.model.credentials, which is not used for the draft model.",
            secret="Name of the secret.",
        ),
    ] = None


def _only_with_draft(name: str) -> Callable[["Speculation", Fields], bool]:
    return lambda speculation, document: speculation.method.needs_draft or not document.has(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: the engine proposes tokens, and verifies several of them in one step."""

    method: Annotated[
        SpeculationMethod,
        Method(
            "Source of the proposed tokens. NGram proposes what followed the most recent tokens where they occurred "
            "before, in the prompt or the answer. DraftModel proposes the tokens of a smaller model (draft).",
            flags=("spec-method", "speculative-config"),
            example="NGram or DraftModel",
            removed={"Eagle": "set method to DraftModel with a smaller model as draft.source, or to NGram"},
        ),
    ]
    draft: Annotated[
        Draft | None,
        Section("The draft model of method DraftModel. Its weights and its share of the KV cache need memory."),
    ] = None
    max_tokens: Annotated[
        int | None,
        Integer(
            "Maximum number of proposed tokens of a sequence that one step verifies, less than blockSize. The engine "
            "verifies as many as the measured cost of steps allows. Default is 8.",
            minimum=1,
            maximum=127,
            flags=("spec-tokens",),
        ),
    ] = None
    required: Annotated[
        bool,
        Boolean(
            "Whether replicas need the draft model. True (default) stops a replica whose draft model cannot be "
            "fetched or used. False lets it serve without speculation.",
            is_default_stored=False,
            flags=("spec-required", "no-spec-required"),
        ),
    ] = True

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
