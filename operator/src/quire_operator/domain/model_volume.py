"""How a pod comes by its model: which volume, which folder of it, and what downloads it first.

Part of ``pod_template``. A model is always below ``/models`` except where ``file:///`` names a folder of the image.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

from quire_operator.domain.names import child_names
from quire_operator.domain.spec import ClaimSource, ExistingClaim, FileSource, HubSource, NewClaim, Spec

MODELS_PATH = "/models"
VOLUME = "models"
TOKEN_KEY = "token"
"""The key of the hub's token in the secret that ``model.credentials`` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVolume:
    """Where the engine finds its model. ``claim_name`` None with ``fetch`` is a volume as old as the pod."""

    model_path: str
    claim_name: str | None
    fetch: HubSource | None
    """What an init container downloads to ``model_path``."""

    @property
    def is_mounted(self) -> bool:
        return self.claim_name is not None or self.fetch is not None


def model_volume(spec: Spec) -> ModelVolume:
    """The volume that a spec's source and cache ask for."""
    claim = _claim(spec)
    match spec.model.source:
        case HubSource() as hub:
            # A revision may contain slashes; a claim may be shared by many models.
            folder = f"{hub.repository}@{hub.revision}".replace("/", "--")
            return ModelVolume(model_path=f"{MODELS_PATH}/{folder}", claim_name=claim, fetch=hub)
        case ClaimSource(claim_name=name, path=path):
            return ModelVolume(model_path=_below(path), claim_name=name, fetch=None)
        case FileSource(path=path, relative=True):
            return ModelVolume(model_path=_below(path), claim_name=claim, fetch=None)
        case FileSource(path=path):
            return ModelVolume(model_path=path, claim_name=claim, fetch=None)


def source_problem(spec: Spec) -> str | None:
    """Why a pod can't have this source though a laptop can, or None."""
    match spec.model.source:
        case FileSource(path=path, relative=True) if ".." in PurePosixPath(path).parts:
            return f"leads out of {MODELS_PATH}, where relative folders start in a pod; use a path without '..'"
        case _:
            return None


def _below(path: str) -> str:
    return f"{MODELS_PATH}/{path}" if path else MODELS_PATH


def _claim(spec: Spec) -> str | None:
    match spec.model.cache:
        case ExistingClaim(claim_name=name):
            return name
        case NewClaim():
            return child_names(spec.name).cache_claim
        case None:
            return None
