"""The children of LLMDeployments, as the operator renders them for tests."""

from typing import Any

from specs import valid_spec

from quire_operator.api import Spec
from quire_operator.deployment.desired import desired
from quire_operator.deployment.manifests import Manifest, Manifests
from quire_operator.deployment.pod_template import Images

IMAGES = Images(engine="registry.example/engine:1")


def rendered(spec: Spec | None = None, target: int = 1, *, images: Images = IMAGES, **options: Any) -> Manifests:
    """Return the children of a valid spec, by default of the smallest one."""
    made = desired(valid_spec() if spec is None else spec, target, uid="uid-1", images=images, **options)
    assert isinstance(made, Manifests), str(made)
    return made


def workload(spec: Spec, **options: Any) -> Any:
    """Return the spec of the Deployment or LeaderWorkerSet."""
    return rendered(spec, **options).workload.body["spec"]


def child(manifests: Manifests, kind: str, name: str = "") -> Manifest | None:
    """Return the only child of a kind and, if given, a name; None if it does not exist."""
    found = [manifest for manifest in manifests if manifest.ref.kind == kind and name in ("", manifest.ref.name)]
    assert len(found) <= 1
    return found[0] if found else None


def volumes(pod: Any) -> dict[str, Any]:
    """Return the volumes of a pod by name."""
    return {volume["name"]: {k: v for k, v in volume.items() if k != "name"} for volume in pod["volumes"]}


def mounts(container: Any) -> dict[str, bool]:
    """Return path → read-only."""
    return {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
