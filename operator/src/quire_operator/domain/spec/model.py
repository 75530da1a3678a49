"""spec.model: where the weights come from, under which name they are served, and where a cluster keeps them."""

import re
from dataclasses import dataclass

from quire_operator.domain.fields import Fields, later_version, shown
from quire_operator.domain.names import object_name_problem

_HUB = re.compile(r"hf://([A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)(?:@([A-Za-z0-9][\w./-]{0,127}))?")
_CLAIM = re.compile(r"pvc://([^/]+)(?:/(.*))?")
_LATER = {
    "s3://": "until then copy the folder to a volume and use pvc://claim/path",
    "oci://": "until then copy the folder to a volume and use pvc://claim/path",
}
_EXAMPLE = '"hf://org/name@revision", "pvc://claim/path", "file:///folder" or "file://./folder"'
_SERVED_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """hf://: a repository of a Hugging Face hub."""

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """file://: a folder. Relative ones start at the YAML file locally and at /models in a pod."""

    path: str
    """Absolute (``/srv/llama``), or relative without the leading ``./`` (``models/quire-demo``)."""
    relative: bool

    def __str__(self) -> str:
        return f"file://./{self.path}" if self.relative else f"file://{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSource:
    """pvc://: a folder on a volume of the cluster; has no meaning without one."""

    claim_name: str
    path: str
    """Below the volume's root; empty is the root."""

    def __str__(self) -> str:
        return f"pvc://{self.claim_name}/{self.path}"


Source = HubSource | FileSource | ClaimSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingClaim:
    """Downloads are kept on a claim that is there already."""

    claim_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewClaim:
    """Downloads are kept on a claim made for this deployment."""

    size_bytes: int
    storage_class_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    source: Source
    served_name: str
    """What clients write in ``model``."""
    credentials_secret: str | None
    """Holds the hub's token in a cluster; locally HF_TOKEN does."""
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
        fields.problem("source", f"is required: {_EXAMPLE}")
        return None
    text = fields.text("source", default=None)
    if text is None:
        return None
    for scheme, instead in _LATER.items():
        if text.startswith(scheme):
            fields.problem("source", later_version(scheme, instead))
            return None
    source = parse_source(text)
    if source is None:
        fields.problem("source", f"must be {_EXAMPLE}, got {shown(text)}")
    return source


def parse_source(text: str) -> Source | None:
    """The source a person wrote, or None if it is not one."""
    if hub := _HUB.fullmatch(text):
        repository, revision = hub.groups()
        return HubSource(repository=repository, revision=revision or "main")
    if claim := _CLAIM.fullmatch(text):
        name, path = claim.groups()
        parts = _clean_path(path or "")
        if parts is None or object_name_problem(name) is not None:
            return None
        return ClaimSource(claim_name=name, path=parts)
    if text.startswith("file:///"):
        path = _clean_path(text.removeprefix("file:///"))
        return FileSource(path=f"/{path}", relative=False) if path else None
    if text.startswith(("file://./", "file://../")):
        path = _clean_path(text.removeprefix("file://"), above=True)
        return FileSource(path=path, relative=True) if path else None
    return None


def _clean_path(path: str, *, above: bool = False) -> str | None:
    """The path without empty and "." parts; None where ".." would leave the folder it belongs to."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if "\0" in path or (".." in parts and not above):
        return None
    return "/".join(parts)


def _served_name_problem(name: str) -> str | None:
    if _SERVED_NAME.fullmatch(name):
        return None
    return "must be letters, digits and '-', '_', '.', ':' or '/', at most 128, starting with a letter or digit"


def _read_cache(fields: Fields) -> ExistingClaim | NewClaim | None:
    if not fields.has("cache"):
        return None
    cache = fields.section("cache")
    claim_name = cache.text("claimName", default=None, check=object_name_problem)
    size = cache.byte_size("size")
    storage_class = cache.text("storageClassName", default=None, check=object_name_problem)
    cache.done()
    if cache.has("claimName") and (cache.has("size") or cache.has("storageClassName")):
        fields.problem(
            "cache", "has claimName (a claim that is there) and size or storageClassName (one to make); keep one"
        )
    elif not cache.has("claimName") and not cache.has("size"):
        fields.problem("cache", "needs claimName (a claim that is there) or size (of one to make)")
    if claim_name is not None:
        return ExistingClaim(claim_name=claim_name)
    return None if size is None else NewClaim(size_bytes=size, storage_class_name=storage_class)
