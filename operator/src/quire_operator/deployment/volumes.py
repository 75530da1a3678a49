"""The volumes of a pod: its model, its draft model, its API keys, and the credentials for their sources. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from quire_common.contract.engine import ENGINE_COMMAND
from quire_common.model_source import link_name
from quire_operator.api import BucketSource, ClaimSource, FileSource, HubSource, ImageSource, RemoteSource, Source, Spec
from quire_operator.api.fields import Problem
from quire_operator.api.names import CACHE_CLAIM_SUFFIX

JSON = dict[str, object]

HUB_TOKEN_KEY = "token"
AWS_REQUIRED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AWS_OPTIONAL = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def credentials_environment(source: RemoteSource, secret: str | None, *, optional: bool = False) -> list[JSON]:
    """Return the variables; none without a secret, because then the pod's own identity counts or none is needed.

    With ``optional``, the container starts without the secret too.
    """
    if secret is None:
        return []
    match source:
        case HubSource():
            return [_variable("HF_TOKEN", secret, HUB_TOKEN_KEY, optional=optional)]
        case BucketSource():
            required = [_variable(key, secret, key, optional=optional) for key in AWS_REQUIRED]
            return required + [_variable(key, secret, key, optional=True) for key in AWS_OPTIONAL]


def adapter_credentials(secret: str) -> list[JSON]:
    """Return the variables for all kinds of sources that one secret may have credentials for."""
    keys = {"HF_TOKEN": HUB_TOKEN_KEY} | {key: key for key in (*AWS_REQUIRED, *AWS_OPTIONAL)}
    return [_variable(name, secret, key, optional=True) for name, key in keys.items()]


def _variable(name: str, secret: str, key: str, *, optional: bool = False) -> JSON:
    reference: JSON = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


MODELS_PATH = "/models"
MODEL_VOLUME = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVolume:
    """The path of the model and the source of its files."""

    model_path: str
    volume: JSON | None
    """The volume at ``/models``, without its name; None without one."""
    fetch: RemoteSource | None = None
    """The source that an init container downloads to ``model_path``."""
    image: ImageSource | None = None
    """The image that the kubelet mounts."""

    @property
    def claim_name(self) -> str | None:
        claim = self._claim
        return None if claim is None else str(claim["claimName"])

    @property
    def takes_downloads(self) -> bool:
        """True if other models can be downloaded to the volume too."""
        claim = self._claim
        return self.fetch is not None or (claim is not None and "readOnly" not in claim)

    @property
    def _claim(self) -> Mapping[str, object] | None:
        claim = None if self.volume is None else self.volume.get("persistentVolumeClaim")
        return claim if isinstance(claim, Mapping) else None


def model_volume(spec: Spec, *, size_limit: str) -> ModelVolume:
    """Return the volume for a spec's source and cache."""
    claim = _claim_volume(spec)
    match spec.model.source:
        case ImageSource() as image:
            return ModelVolume(
                model_path=below(MODELS_PATH, image.path), volume={"image": {"reference": image.image}}, image=image
            )
        case HubSource() | BucketSource() as remote:
            # Many models may share a claim, which other pods may mount at another path.
            path = f"{MODELS_PATH}/{link_name(remote)}"
            return ModelVolume(model_path=path, volume=claim or {"emptyDir": {"sizeLimit": size_limit}}, fetch=remote)
        case ClaimSource(claim_name=name, path=path):
            # Read-only for the whole pod: a claim with ReadOnlyMany can be mounted on several nodes only like this.
            volume: JSON = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
            return ModelVolume(model_path=below(MODELS_PATH, path), volume=volume)
        case FileSource(path=path, relative=True):
            return ModelVolume(model_path=below(MODELS_PATH, path), volume=claim)
        case FileSource(path=path):
            return ModelVolume(model_path=path, volume=claim)


def image_field(spec: Spec) -> str | None:
    """Return the field whose image the kubelet mounts as a model; None if it mounts none."""
    if isinstance(spec.model.source, ImageSource):
        return "spec.model.source"
    is_draft = spec.draft is not None and isinstance(spec.draft.source, ImageSource)
    return "spec.engine.speculation.draft.source" if is_draft else None


def image_problem(field: str) -> Problem:
    """Return the problem of a field that names an image on a cluster without image volumes."""
    return Problem(
        path=field,
        message="this cluster's API server drops image volumes, so no pod can mount the image: use Kubernetes 1.35 or "
        "newer, enable the feature gate ImageVolume (from 1.31), or use hf://, s3:// or pvc://",
    )


def file_problem(source: Source) -> str | None:
    """Return why a pod cannot use this source although local mode can, or None."""
    match source:
        case FileSource(path=path, relative=True) if ".." in PurePosixPath(path).parts:
            return f"is outside {MODELS_PATH}, where relative folders start in a pod; use a path without '..'"
        case _:
            return None


def below(root: str, path: str) -> str:
    """Return a path below a folder; an empty one is the folder itself."""
    return f"{root}/{path}" if path else root


def _claim_volume(spec: Spec) -> JSON | None:
    cache = spec.model.cache
    if cache is None:
        return None
    return {"persistentVolumeClaim": {"claimName": cache.claim_name or f"{spec.name}{CACHE_CLAIM_SUFFIX}"}}


DRAFT_PATH = "/draft"
DRAFT_VOLUME = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVolume:
    """The path of the draft model and the source of its files."""

    model_path: str
    volume: JSON | None = None
    """The volume at ``/draft``, without its name; None if the draft model needs none of its own."""
    fetch: RemoteSource | None = None
    """The source that an init container downloads to ``model_path``."""
    pull_secret: str | None = None
    """The secret for an image that the kubelet mounts."""

    @property
    def mount(self) -> JSON:
        """The mount of the volume that contains the draft model."""
        if self.volume is None:
            return {"name": MODEL_VOLUME, "mountPath": MODELS_PATH}
        return {"name": DRAFT_VOLUME, "mountPath": DRAFT_PATH}


def draft_volume(spec: Spec, target: ModelVolume, *, size_limit: str) -> DraftVolume | None:
    """Return the volume of the draft model in a pod with this volume of the target; None without a draft model."""
    draft = spec.draft
    if draft is None:
        return None
    match draft.source:
        case ImageSource() as image:
            return DraftVolume(
                model_path=below(DRAFT_PATH, image.path),
                volume={"image": {"reference": image.image}},
                pull_secret=draft.credentials_secret,
            )
        case HubSource() | BucketSource() as remote:
            if target.takes_downloads:
                return DraftVolume(model_path=below(MODELS_PATH, link_name(remote)), fetch=remote)
            volume: JSON = {"emptyDir": {"sizeLimit": size_limit}}
            return DraftVolume(model_path=below(DRAFT_PATH, link_name(remote)), volume=volume, fetch=remote)
        case ClaimSource(claim_name=name, path=path):
            if target.claim_name == name:
                return DraftVolume(model_path=below(MODELS_PATH, path))
            volume = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
            return DraftVolume(model_path=below(DRAFT_PATH, path), volume=volume)
        case FileSource(path=path, relative=True):
            return DraftVolume(model_path=below(MODELS_PATH, path))
        case FileSource(path=path):
            return DraftVolume(model_path=path)


def draft_problem(spec: Spec) -> Problem | None:
    """Return why a pod cannot use the source of the draft model although local mode can, or None."""
    message = None if spec.draft is None else file_problem(spec.draft.source)
    return None if message is None else Problem(path="spec.engine.speculation.draft.source", message=message)


KEY_VOLUME = "api-keys"
CHECK = "check-api-keys"
SECRET_KEY = "keys"
"""The key of the secret that contains the file."""
_PATH = "/etc/quire/api-keys"
KEY_FILE = f"{_PATH}/{SECRET_KEY}"

_MODE = 0o440  # the pod's user is in the volume's group


def key_volume(secret: str) -> JSON:
    """Return the volume, which contains only the key file of the secret."""
    items = [{"key": SECRET_KEY, "path": SECRET_KEY}]
    return {
        "name": KEY_VOLUME,
        "secret": {"secretName": secret, "items": items, "defaultMode": _MODE, "optional": True},
    }


def key_mount() -> JSON:
    return {"name": KEY_VOLUME, "mountPath": _PATH, "readOnly": True}


def check_container(secret: str, *, image: JSON, security: JSON) -> JSON:
    """Return the init container, which can start only if the secret exists and has the key."""
    reference = {"name": secret, "key": SECRET_KEY}
    return {
        "name": CHECK,
        **image,
        "command": [ENGINE_COMMAND],
        "args": ["--version"],
        "env": [{"name": "API_KEYS", "valueFrom": {"secretKeyRef": reference}}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }
