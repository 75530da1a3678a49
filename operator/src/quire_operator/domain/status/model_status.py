"""``status.model``: which version of a moving model source an LLMDeployment serves, and what its pods report. Pure.

A branch such as ``@main`` means another commit after each push. It is resolved once and stored here, and pods get the
commit: so all replicas serve the same weights, and another version is a rollout. It is resolved again only if
spec.model.source or the annotation quire.dev/refresh-model changes; another change of the spec, such as a number of
replicas, does not change the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.cluster_state.observed import Pod, Resource
from quire_operator.domain.resource import HubSource, RemoteSource, Spec
from quire_operator.domain.resource.untyped import section_of
from quire_operator.domain.status.conditions import BlockingCondition
from quire_operator.domain.status.download import Download, download_section

SECTION = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The resolution of a moving source."""

    source: str
    revision: str | None
    """None if the hub did not say, for example because the model is private: pods then resolve it themselves."""
    refresh: str
    """The value of the annotation quire.dev/refresh-model at that time."""


def needs_resolution(spec: Spec) -> bool:
    """Return whether the operator can resolve the source, which only hubs answer without credentials."""
    return isinstance(spec.model.source, HubSource) and not spec.model.source.is_pinned


def stored_resolution(resource: Resource, spec: Spec) -> Resolution | None:
    """Return the resolution that still applies; None if the source must be resolved."""
    section = resource.status.get(SECTION)
    if not isinstance(section, Mapping) or section.get("source") != str(spec.model.source):
        return None
    refresh, revision = section.get("refresh", ""), section.get("revision")
    if refresh != resource.refresh_model:
        return None
    found = revision if isinstance(revision, str) and revision else None
    return Resolution(source=str(spec.model.source), revision=found, refresh=resource.refresh_model)


def with_revision(spec: Spec, resolution: Resolution | None) -> Spec:
    """Return the spec with the commit instead of the branch."""
    source = spec.model.source
    if resolution is None or resolution.revision is None or not isinstance(source, HubSource):
        return spec
    return replace(spec, model=replace(spec.model, source=replace(source, revision=resolution.revision)))


def model_section(
    resolution: Resolution | None, spec: Spec | None, pods: Sequence[Pod], download: Download | None
) -> dict[str, object]:
    """Return ``status.model``; empty if there is nothing to say."""
    section: dict[str, object] = {}
    if resolution is not None:
        section["source"] = resolution.source
        if resolution.revision is not None:
            section["revision"] = resolution.revision
        if resolution.refresh:
            section["refresh"] = resolution.refresh
    if versions := pod_versions(pods):
        section["podVersions"] = versions
    if download is not None:
        section["download"] = download_section(download)
    if section and spec is not None:
        section.setdefault("source", str(spec.model.source))
    return section


def kept_resolution(resource: Resource) -> dict[str, object]:
    """Return the part of ``status.model`` that stays while the spec is invalid: progress does not."""
    kept = section_of(resource.status, SECTION)
    return {name: value for name, value in kept.items() if name not in ("podVersions", "download")}


def pod_versions(pods: Sequence[Pod]) -> list[str]:
    """Return the versions that the downloads of live pods reported."""
    return sorted({pod.model_version for pod in pods if pod.model_version and not pod.deleting})


def mixed_versions(spec: Spec, pods: Sequence[Pod], *, is_rolling: bool) -> BlockingCondition | None:
    """Return the problem that replicas of one template serve different versions, or None."""
    versions = pod_versions(pods)
    if is_rolling or len(versions) < 2 or not isinstance(spec.model.source, RemoteSource):
        return None
    return BlockingCondition(
        reason="MixedModelVersions",
        message=(
            f"spec.model.source: {spec.model.source} has changed, and replicas serve different versions of it: "
            f"{', '.join(versions)}; name a commit or digest, or restart the replicas"
        ),
    )
