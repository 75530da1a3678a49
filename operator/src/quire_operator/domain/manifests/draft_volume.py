"""The draft model of a pod: its folder, its volume if it needs one of its own, and its download.

Part of ``pod_template``. Downloads go to the volume of the target's download or cache, because both are caches of
models with folders of their own. A claim that both use is mounted once: not every driver mounts it twice in a pod.
"""

from dataclasses import dataclass

from quire_common.model_source import link_name
from quire_operator.domain.manifests.model_volume import MODELS_PATH, VOLUME, ModelVolume, below, file_problem
from quire_operator.domain.resource import (
    BucketSource,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    Spec,
)
from quire_operator.domain.resource.fields import Problem

JSON = dict[str, object]

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
            return {"name": VOLUME, "mountPath": MODELS_PATH}
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
