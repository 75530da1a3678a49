"""The model of a pod: the volume, the folder in it, and the download before the engine starts.

Part of ``pod_template``. A model is always below ``/models`` except where ``file:///`` names a folder of the image.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from quire_common.model_source import link_name
from quire_operator.domain.resource import (
    BucketSource,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    Source,
    Spec,
)
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.names import CACHE_CLAIM_SUFFIX

JSON = dict[str, object]

MODELS_PATH = "/models"
VOLUME = "models"


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
        """The claim at ``/models``."""
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
