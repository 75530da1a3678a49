"""Model sources (``spec.model.source``): their syntax, and the names of their folders in a cache of fetched models.

The operator validates them. ``quire-fetch`` downloads hubs and buckets; the kubelet mounts images and claims.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qsl, quote

from quire_common.names import is_http_url, object_name_problem

EXAMPLES = (
    '"hf://org/name@revision", "s3://bucket/path", "oci://registry/name:tag", "pvc://claim/path", "file:///folder" or '
    '"file://./folder"'
)
_OF_SCHEME = {
    "s3://": '"s3://bucket/path", optionally followed by ?region=… and &endpoint=https://…',
    "oci://": 'a registry, a name and a tag or digest, such as "oci://registry.example/org/model:1", then /path if the '
    "model is in a folder of the image",
}
_HUB = re.compile(r"hf://([A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)(?:@([A-Za-z0-9][\w./-]{0,127}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CLAIM = re.compile(r"pvc://([^/]+)(?:/(.*))?")
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^?]*))?(?:\?(.+))?")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOST = r"localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::[0-9]{1,5})?|[A-Za-z0-9-]+:[0-9]{1,5}"
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"oci://({_HOST})/({_PART}(?:/{_PART})*)(?::([\w][\w.-]{{0,127}}))?(?:@(sha256:[0-9a-f]{{64}}))?(?:/(.*))?",
    re.ASCII,
)
_LONGEST_FOLDER = 100
NO_DOWNLOAD = "is an image, which only the kubelet of a cluster mounts"
UNPACK = "unpack it into a folder, for example with `oras pull` or `docker cp`, and name that folder"


def cache_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of downloaded models: QUIRE_CACHE, else as the XDG Base Directory Specification says."""
    if chosen := environ.get("QUIRE_CACHE"):
        return Path(chosen).expanduser() / "models"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """hf://: a repository of a Hugging Face hub."""

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}"

    @property
    def cache_name(self) -> str:
        """The folder that keeps all of its versions."""
        return self.repository.replace("/", "--")

    @property
    def reference(self) -> str:
        """The name or hash that selects the version."""
        return self.revision

    @property
    def is_pinned(self) -> bool:
        """True if the reference can never mean another version."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSource:
    """s3://: the objects below a prefix of a bucket, in Amazon S3 or a compatible store.

    Its properties mean what those of ``HubSource`` do.
    """

    bucket: str
    prefix: str
    """Without slashes at its ends; empty is the whole bucket."""
    region: str | None = None
    endpoint: str | None = None
    """None: AWS_ENDPOINT_URL, else Amazon's own."""

    def __str__(self) -> str:
        choices = {"region": self.region, "endpoint": self.endpoint}
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in choices.items() if value is not None)
        path = f"/{self.prefix}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + (f"?{query}" if query else "")

    @property
    def cache_name(self) -> str:
        return _folder_name("s3", self.bucket, self.prefix, disambiguator=self.endpoint or "")

    @property
    def reference(self) -> str:
        return "latest"  # a bucket has one version, its content

    @property
    def is_pinned(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """oci://: an image of a registry, or a folder inside it."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None
    """sha256:…; the tag, the digest or both are set."""
    path: str = ""
    """Below the image's root; empty is the root."""

    def __str__(self) -> str:
        return f"oci://{self.image}" + (f"/{self.path}" if self.path else "")

    @property
    def image(self) -> str:
        """The reference in the form that container runtimes use."""
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """file://: a folder. Relative paths start at the YAML file locally and at /models in a pod."""

    path: str
    """Absolute (``/srv/llama``), or relative without the leading ``./`` (``models/quire-demo``)."""
    relative: bool

    def __str__(self) -> str:
        return f"file://./{self.path}" if self.relative else f"file://{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSource:
    """pvc://: a folder on a volume of the cluster; it has no meaning without a cluster."""

    claim_name: str
    path: str
    """Below the volume's root; empty is the root."""

    def __str__(self) -> str:
        return f"pvc://{self.claim_name}/{self.path}"


RemoteSource = HubSource | BucketSource
"""Sources that are downloaded."""
Source = RemoteSource | ImageSource | FileSource | ClaimSource


def link_name(source: RemoteSource) -> str:
    """Return the name of the link to the selected version, next to the folder with all versions."""
    return f"{source.cache_name}@{source.reference}".replace("/", "--")  # a revision may contain slashes


def reference_file(root: Path, source: RemoteSource) -> Path:
    """Return the file in the model cache at ``root`` that names the version to which the reference last resolved."""
    return root / source.cache_name / "refs" / quote(source.reference, safe="")


def cached_model(root: Path, source: RemoteSource) -> Path | None:
    """Return the folder of the complete version to which the reference last resolved, or None."""
    version = cached_version(root, source) or source.reference
    folder = root / source.cache_name / version
    return folder if "/" not in version and folder.is_dir() else None


def cached_version(root: Path, source: RemoteSource) -> str | None:
    """Return the version to which the reference last resolved, or None if it never did."""
    try:
        return reference_file(root, source).read_text()
    except OSError:
        return None


def parse_source(text: str) -> Source | None:
    """Return the source that the text names, or None if it names none."""
    if hub := _HUB.fullmatch(text):
        repository, revision = hub.groups()
        return HubSource(repository=repository, revision=revision or "main")
    if claim := _CLAIM.fullmatch(text):
        name, path = claim.groups()
        parts = _clean_path(path or "")
        if parts is None or object_name_problem(name) is not None:
            return None
        return ClaimSource(claim_name=name, path=parts)
    if text.startswith("s3://"):
        return _parse_bucket(text)
    if text.startswith("oci://"):
        return _parse_image(text)
    if text.startswith("file:///"):
        path = _clean_path(text.removeprefix("file:///"))
        return FileSource(path=f"/{path}", relative=False) if path else None
    if text.startswith(("file://./", "file://../")):
        path = _clean_path(text.removeprefix("file://"), above=True)
        return FileSource(path=path, relative=True) if path else None
    return None


def expected(text: str) -> str:
    """Return what is expected in place of a text that is not a source."""
    return next((words for scheme, words in _OF_SCHEME.items() if text.startswith(scheme)), EXAMPLES)


def _parse_bucket(text: str) -> BucketSource | None:
    found = _BUCKET.fullmatch(text)
    if found is None or not text.isprintable():
        return None
    bucket, prefix, query = found.groups()
    try:
        choices = dict(parse_qsl(query or "", strict_parsing=bool(query), keep_blank_values=True))
    except ValueError:
        return None
    region, endpoint = choices.pop("region", None), choices.pop("endpoint", None)
    if choices or (region is not None and _REGION.fullmatch(region) is None):
        return None
    if endpoint is not None and not is_http_url(endpoint):
        return None
    return BucketSource(bucket=bucket, prefix=(prefix or "").strip("/"), region=region, endpoint=endpoint)


def _parse_image(text: str) -> ImageSource | None:
    found = _IMAGE.fullmatch(text)
    if found is None:
        return None
    registry, repository, tag, digest, path = found.groups()
    inside = _clean_path(path or "")
    if inside is None or (tag is None and digest is None):
        return None
    return ImageSource(registry=registry, repository=repository, tag=tag, digest=digest, path=inside)


def _clean_path(path: str, *, above: bool = False) -> str | None:
    """Return the path without empty and "." parts; None if ".." would leave its folder."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if "\0" in path or (".." in parts and not above):
        return None
    return "/".join(parts)


def _folder_name(*parts: str, disambiguator: str = "") -> str:
    """Return a readable name for the parts, with a digest where the name would be ambiguous."""
    text = "--".join(part.replace("/", "--") for part in parts if part)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    is_unique = safe == text and len(text) <= _LONGEST_FOLDER and not any("--" in part for part in parts)
    if is_unique and not disambiguator:
        return text
    digest = sha256("\0".join((*parts, disambiguator)).encode()).hexdigest()
    return f"{safe[:_LONGEST_FOLDER]}-{digest[:12]}"
