"""The children of one LLMDeployment in the cluster: ``desired(spec, target, …) -> Manifests``, pure."""

from collections.abc import Sequence

from quire_common.contract.adapters_file import AdapterEntry
from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.manifests.child_kinds import CHILDREN, Parent, render
from quire_operator.domain.manifests.cluster_features import NO_FEATURES, ClusterFeatures
from quire_operator.domain.manifests.objects import Manifests, labels, selector
from quire_operator.domain.manifests.pod_template import Images, pod_template
from quire_operator.domain.manifests.served_names import served_names
from quire_operator.domain.resource import Invalid, Spec
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
    template = pod_template(
        spec,
        images,
        labels=labels(spec.name),
        selector=selector(spec.name),
        served_names=served_names(spec, features.served_names),
    )
    if not isinstance(template, dict):
        return Invalid(name=spec.name, namespace=spec.namespace, problems=template)
    parent = Parent(
        spec=spec,
        uid=uid,
        created=created,
        target=target,
        template=template,
        features=features,
        adapters=adapters,
    )
    return Manifests(children=tuple(render(child, parent) for child in CHILDREN if child.is_wanted(spec, features)))


def all_problems(invalid: Invalid, images: Images) -> tuple[Problem, ...]:
    """Return the problems of a document, and those that show only when its pod template is merged."""
    spec = invalid.readable
    if spec is None:
        return invalid.problems
    template = pod_template(
        spec, images, labels=labels(spec.name), selector=selector(spec.name), served_names=(spec.model.served_name,)
    )
    return invalid.problems if isinstance(template, dict) else (*invalid.problems, *template)


def child_refs(spec: Spec, features: ClusterFeatures = NO_FEATURES) -> tuple[Ref, ...]:
    """Return the names of the children, which are known before anything else about them."""
    return tuple(child.ref(spec.name) for child in CHILDREN if child.is_wanted(spec, features))
