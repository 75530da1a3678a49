"""The children of one LLMDeployment in the cluster: ``desired(spec, target, …) -> Manifests``, pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire_common.contract.adapters_file import AdapterEntry
from quire_common.contract.engine import GROUP_SECRET_VARIABLE
from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.manifests.child_kinds import CHILDREN, Parent, render
from quire_operator.domain.manifests.cluster_features import NO_FEATURES, ClusterFeatures
from quire_operator.domain.manifests.objects import Manifests, digest, labels, selector
from quire_operator.domain.manifests.pod_contract import ENGINE
from quire_operator.domain.manifests.pod_template import JSON, Images, pod_template
from quire_operator.domain.manifests.served_names import served_names
from quire_operator.domain.resource import Invalid, Spec, names
from quire_operator.domain.resource.fields import Problem


def desired(
    spec: Spec,
    target: int,
    *,
    uid: str,
    images: Images,
    created: str = "",
    features: ClusterFeatures = NO_FEATURES,
    adapters: Sequence[AdapterEntry] = (),
) -> Manifests | Invalid:
    """Return the children of the LLMDeployment with this ``uid`` and creation time, with ``target`` replicas.

    ``adapters`` are those that its replicas are to serve.
    """
    templates = _templates(spec, images, served_names(spec, features.served_names), uid)
    if not isinstance(templates, Templates):
        return Invalid(name=spec.name, namespace=spec.namespace, problems=templates)
    parent = Parent(
        spec=spec,
        uid=uid,
        created=created,
        target=target,
        template=templates.leader,
        worker_template=templates.worker,
        features=features,
        adapters=adapters,
    )
    return Manifests(children=tuple(render(child, parent) for child in CHILDREN if child.is_wanted(spec, features)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """The templates of the pods of a replica."""

    leader: JSON
    """The template of the replica itself, or of the leader of a group."""
    worker: JSON | None = None


def group_secret_name(manifests: Manifests) -> str | None:
    """Return the name of the Secret that pods of groups need; None if replicas are single pods."""
    template: Any = manifests.workload.body["spec"]
    if "leaderWorkerTemplate" not in template:
        return None
    containers = template["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    env = next(container["env"] for container in containers if container["name"] == ENGINE)
    found = next(entry for entry in env if entry["name"] == GROUP_SECRET_VARIABLE)
    return str(found["valueFrom"]["secretKeyRef"]["name"])


def _templates(spec: Spec, images: Images, served: Sequence[str], uid: str) -> Templates | tuple[Problem, ...]:
    if not spec.parallelism.is_group:
        alone = _template(spec, images, served, names.COMPONENT, None)
        return Templates(leader=alone) if isinstance(alone, dict) else alone
    # Another template has another secret, so its name follows from the template without it. It also follows from the
    # uid, so that a Secret that exists before the LLMDeployment is never used: the operator cannot see whose it is.
    draft = _template(spec, images, served, names.COMPONENT, "")
    if not isinstance(draft, dict):
        return draft
    unique = digest({"template": draft, "size": spec.parallelism.nodes, "uid": uid})
    secret = f"{spec.name}{names.GROUP_SUFFIX}-{unique[:10]}"
    leader = _template(spec, images, served, names.COMPONENT, secret)
    worker = _template(spec, images, served, names.WORKER_COMPONENT, secret)
    assert isinstance(leader, dict) and isinstance(worker, dict)  # they differ from the draft in names only
    return Templates(leader=leader, worker=worker)


def _template(
    spec: Spec, images: Images, served: Sequence[str], component: str, group_secret: str | None
) -> JSON | tuple[Problem, ...]:
    return pod_template(
        spec,
        images,
        labels=labels(spec.name, component=component),
        selector=selector(spec.name, component=component),
        served_names=served,
        group_secret=group_secret,
    )


def all_problems(invalid: Invalid, images: Images) -> tuple[Problem, ...]:
    """Return the problems of a document, and those that show only when its pod template is merged."""
    spec = invalid.readable
    if spec is None:
        return invalid.problems
    templates = _templates(spec, images, (spec.model.served_name,), "")
    return invalid.problems if isinstance(templates, Templates) else (*invalid.problems, *templates)


def child_refs(spec: Spec, features: ClusterFeatures = NO_FEATURES) -> tuple[Ref, ...]:
    """Return the names of the children, which are known before anything else about them."""
    return tuple(child.ref(spec.name) for child in CHILDREN if child.is_wanted(spec, features))
