"""spec.model: where the weights come from, under which name they are served, and where a cluster keeps them."""

import re
from dataclasses import dataclass
from enum import StrEnum

from quire_common.model_source import EXAMPLES, Source, expected, parse_source
from quire_common.names import object_name_problem
from quire_operator.domain.resource.fields import Fields, shown

_OF_NEW_CLAIMS = ("size", "storageClassName", "accessMode", "retain")
_SERVED_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,127}")


class AccessMode(StrEnum):
    """As a claim's: which nodes may mount it."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class Retention(StrEnum):
    """The fate of a claim when its LLMDeployment is deleted."""

    DELETE = "Delete"
    RETAIN = "Retain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingClaim:
    """Downloads are kept on a claim that is there already."""

    claim_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewClaim:
    """Downloads are kept on a claim made for this deployment."""

    size_bytes: int
    storage_class_name: str | None
    access_mode: AccessMode
    retain: Retention = Retention.DELETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    source: Source
    served_name: str
    """What clients write in ``model``."""
    credentials_secret: str | None
    """Holds what the source asks for in a cluster; locally the usual variables and files of each do."""
    cache: ExistingClaim | NewClaim | None
    """Where a cluster keeps downloads; locally they are in the user's cache folder."""


def read_model(fields: Fields, *, deployment_name: str) -> Model | None:
    """spec.model, or None without a usable source (the problem is noted)."""
    source = _read_source(fields)
    model = None
    served_name = fields.text("servedName", default=deployment_name, check=_served_name_problem)
    credentials = read_secret_name(fields, "credentials")
    cache = _read_cache(fields)
    if source is not None:
        model = Model(source=source, served_name=served_name, credentials_secret=credentials, cache=cache)
    fields.done()
    return model


def read_secret_name(fields: Fields, key: str) -> str | None:
    """``{secretName: …}``, or None where it is absent."""
    if not fields.has(key):
        return None
    reference = fields.section(key)
    name = reference.text("secretName", default=None, check=object_name_problem)
    if not reference.has("secretName"):
        reference.problem("secretName", "is required")
    reference.done()
    return name


def _read_source(fields: Fields) -> Source | None:
    if not fields.has("source"):
        fields.problem("source", f"is required: {EXAMPLES}")
        return None
    text = fields.text("source", default=None)
    if text is None:
        return None
    source = parse_source(text)
    if source is None:
        fields.problem("source", f"must be {expected(text)}, got {shown(text)}")
    return source


def _served_name_problem(name: str) -> str | None:
    if _SERVED_NAME.fullmatch(name):
        return None
    return "must start with a letter or digit and contain at most 128 letters, digits and '-', '_', '.', ':' or '/'"


def _read_cache(fields: Fields) -> ExistingClaim | NewClaim | None:
    if not fields.has("cache"):
        return None
    cache = fields.section("cache")
    claim_name = cache.text("claimName", default=None, check=object_name_problem)
    size = cache.byte_size("size")
    storage_class = cache.text("storageClassName", default=None, check=object_name_problem)
    access_mode = cache.choice("accessMode", AccessMode, default=AccessMode.READ_WRITE_ONCE)
    retain = cache.choice("retain", Retention, default=Retention.DELETE)
    cache.done()
    if cache.has("claimName") and any(cache.has(key) for key in _OF_NEW_CLAIMS):
        fields.problem(
            "cache",
            f"claimName (an existing claim) cannot be combined with {', '.join(_OF_NEW_CLAIMS)}",
        )
    elif not cache.has("claimName") and not cache.has("size"):
        fields.problem("cache", "set claimName (an existing claim) or size (a claim that quire creates)")
    if claim_name is not None:
        return ExistingClaim(claim_name=claim_name)
    if size is None:
        return None
    return NewClaim(size_bytes=size, storage_class_name=storage_class, access_mode=access_mode, retain=retain)
