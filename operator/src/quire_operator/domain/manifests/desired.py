"""What there should be in the cluster for one LLMDeployment: ``desired(spec, target, …) -> Manifests``, pure.

After ``spec``, before ``plan``. Fields that Kubernetes would default are left out, and every field rendered is ours:
whoever changes it finds it changed back. ``replicas`` is always rendered from the target: dropping it would reset it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from json import dumps
from math import ceil

from quire_common.contract import engine
from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.manifests.cluster_features import POD_MONITOR, PROMETHEUS_RULE, ClusterFeatures
from quire_operator.domain.manifests.monitoring import pod_monitor, prometheus_rule
from quire_operator.domain.manifests.network_policy import network_policy
from quire_operator.domain.manifests.pod_template import STARTUP_SECONDS, Images, pod_template
from quire_operator.domain.manifests.served_names import seniority
from quire_operator.domain.resource import Invalid, NewClaim, RemoteSource, RolloutStrategy, Spec, names
from quire_operator.domain.resource.fields import Problem

JSON = dict[str, object]

_MONITORING = "monitoring.coreos.com/v1"
COMPONENT = "engine"
HEADLESS_COMPONENT = "engine-headless"
# A rollout may wait this long for the scheduler and the image beside the model; a hub needs time to download.
_PROGRESS_MARGIN_SECONDS, _DOWNLOAD_SECONDS = 600, 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One object as it is applied."""

    ref: Ref
    body: JSON

    @property
    def digest(self) -> str:
        """Equal for equal bodies."""
        return blake2b(dumps(self.body, sort_keys=True).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """The children, in the order in which they are made: what pods need comes before the Deployment."""

    service_account: Manifest
    cache_claim: Manifest | None
    service: Manifest
    headless_service: Manifest
    network_policy: Manifest | None
    pod_disruption_budget: Manifest
    deployment: Manifest
    pod_monitor: Manifest | None
    prometheus_rule: Manifest | None

    def __iter__(self) -> Iterator[Manifest]:
        if self.cache_claim is not None:
            yield self.cache_claim
        yield self.service_account
        yield self.service
        yield self.headless_service
        if self.network_policy is not None:
            yield self.network_policy
        yield self.pod_disruption_budget
        yield self.deployment
        if self.pod_monitor is not None:
            yield self.pod_monitor
        if self.prometheus_rule is not None:
            yield self.prometheus_rule


NO_FEATURES = ClusterFeatures()


def desired(
    spec: Spec,
    target: int,
    *,
    uid: str,
    images: Images,
    created: str = "",
    features: ClusterFeatures = NO_FEATURES,
) -> Manifests | Invalid:
    """The children of the LLMDeployment with this ``uid``, ``created`` then, running ``target`` replicas."""
    children = names.child_names(spec.name)
    template = pod_template(spec, images, labels=labels(spec.name), selector=selector(spec.name))
    if not isinstance(template, dict):
        return Invalid(name=spec.name, namespace=spec.namespace, problems=template)
    build = _Builder(spec=spec, uid=uid, created=created)
    return Manifests(
        service_account=build.manifest(
            "v1", "ServiceAccount", children.service_account, {"automountServiceAccountToken": False}
        ),
        cache_claim=_cache_claim(build, children.cache_claim),
        service=_service(build, children.service),
        headless_service=_headless_service(build, children.headless_service),
        network_policy=_network_policy(build, children.network_policy, features),
        pod_disruption_budget=_pod_disruption_budget(build, children.pod_disruption_budget),
        deployment=_deployment(build, children.deployment, target, template),
        pod_monitor=_pod_monitor(build, children.pod_monitor, features),
        prometheus_rule=_prometheus_rule(build, children.prometheus_rule, features),
    )


def all_problems(invalid: Invalid, images: Images) -> tuple[Problem, ...]:
    """Those of a document, and those that show only where its pod template is merged."""
    spec = invalid.readable
    if spec is None:
        return invalid.problems
    template = pod_template(spec, images, labels=labels(spec.name), selector=selector(spec.name))
    return invalid.problems if isinstance(template, dict) else (*invalid.problems, *template)


def child_refs(spec: Spec, features: ClusterFeatures = NO_FEATURES) -> tuple[Ref, ...]:
    """What the children will be called, before anything else about them is known."""
    children = names.child_names(spec.name)
    refs = [
        Ref("ServiceAccount", children.service_account),
        Ref("Service", children.service),
        Ref("Service", children.headless_service),
        Ref("PodDisruptionBudget", children.pod_disruption_budget),
        Ref("Deployment", children.deployment),
    ]
    if isinstance(spec.model.cache, NewClaim):
        refs.append(Ref("PersistentVolumeClaim", children.cache_claim))
    if features.network_peers is not None:
        refs.append(Ref("NetworkPolicy", children.network_policy))
    if features.makes(POD_MONITOR):
        refs.append(Ref(POD_MONITOR, children.pod_monitor))
    if features.makes(PROMETHEUS_RULE) and spec.autoscaling is not None:
        refs.append(Ref(PROMETHEUS_RULE, children.prometheus_rule))
    return tuple(refs)


def labels(name: str, *, component: str = COMPONENT) -> dict[str, str]:
    """The labels of a child."""
    return {
        names.LABEL_APP: "quire",
        names.LABEL_INSTANCE: name,
        names.LABEL_COMPONENT: component,
        names.LABEL_MANAGED_BY: "quire-operator",
        names.LABEL_DEPLOYMENT: name,
    }


def selector(name: str) -> dict[str, str]:
    """What finds the pods of one LLMDeployment. A Deployment's can never change: so no label of a person's is in it."""
    return {names.LABEL_DEPLOYMENT: name, names.LABEL_COMPONENT: COMPONENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    spec: Spec
    uid: str
    created: str

    def manifest(
        self,
        api_version: str,
        kind: str,
        name: str,
        content: JSON,
        *,
        component: str = COMPONENT,
        annotations: Mapping[str, str] | None = None,
        more_labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        metadata: JSON = {
            "name": name,
            "namespace": self.spec.namespace,
            "labels": {**(more_labels or {}), **labels(self.spec.name, component=component)},
            "ownerReferences": [self._owner()],
        }
        if annotations:
            metadata["annotations"] = annotations
        body = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
        return Manifest(ref=Ref(kind, name), body=body)

    def _owner(self) -> JSON:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.spec.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def _deployment(build: _Builder, name: str, target: int, template: JSON) -> Manifest:
    spec = build.spec
    content: JSON = {
        "replicas": target,
        "selector": {"matchLabels": selector(spec.name)},
        "strategy": _strategy(spec),
        "progressDeadlineSeconds": progress_deadline_seconds(spec),
        "revisionHistoryLimit": 3,
        "template": template,
    }
    return build.manifest("apps/v1", "Deployment", name, {"spec": content})


def progress_deadline_seconds(spec: Spec) -> int:
    """How long a rollout may go without a replica more becoming ready."""
    if spec.rollout.progress_deadline_seconds is not None:
        return ceil(spec.rollout.progress_deadline_seconds)
    download = _DOWNLOAD_SECONDS if isinstance(spec.model.source, RemoteSource) else 0
    return STARTUP_SECONDS + _PROGRESS_MARGIN_SECONDS + download


def _strategy(spec: Spec) -> JSON:
    if spec.rollout.strategy is RolloutStrategy.RECREATE:
        return {"type": "Recreate"}
    limits = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": limits}


def _service(build: _Builder, name: str) -> Manifest:
    served = {names.ANNOTATION_SERVED_NAME: build.spec.model.served_name}
    if build.created:
        served[names.ANNOTATION_SENIORITY] = seniority(build.created, build.uid)
    content: JSON = {"spec": {"selector": selector(build.spec.name), "ports": [_port()]}}
    return build.manifest("v1", "Service", name, content, annotations=served)


def _headless_service(build: _Builder, name: str) -> Manifest:
    content: JSON = {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(build.spec.name),
            "ports": [_port()],
        }
    }
    return build.manifest("v1", "Service", name, content, component=HEADLESS_COMPONENT)


def _port() -> JSON:
    return {
        "name": engine.HTTP_PORT_NAME,
        "port": engine.HTTP_PORT,
        "protocol": "TCP",
        "targetPort": engine.HTTP_PORT_NAME,
    }


def _pod_disruption_budget(build: _Builder, name: str) -> Manifest:
    content: JSON = {
        "maxUnavailable": 1,
        # A replica that is not ready serves nobody: a drain need not wait for it.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(build.spec.name)},
    }
    return build.manifest("policy/v1", "PodDisruptionBudget", name, {"spec": content})


def _network_policy(build: _Builder, name: str, features: ClusterFeatures) -> Manifest | None:
    if features.network_peers is None:
        return None
    content: JSON = {"spec": network_policy(features.network_peers, selector=selector(build.spec.name))}
    return build.manifest("networking.k8s.io/v1", "NetworkPolicy", name, content)


def _pod_monitor(build: _Builder, name: str, features: ClusterFeatures) -> Manifest | None:
    options = features.monitoring
    if options is None or not features.makes(POD_MONITOR):
        return None
    content: JSON = {"spec": pod_monitor(options, selector=selector(build.spec.name))}
    return build.manifest(_MONITORING, POD_MONITOR, name, content, more_labels=options.pod_monitor_labels)


def _prometheus_rule(build: _Builder, name: str, features: ClusterFeatures) -> Manifest | None:
    options = features.monitoring
    if options is None or not features.makes(PROMETHEUS_RULE):
        return None
    rule = prometheus_rule(build.spec, options)
    if rule is None:
        return None
    return build.manifest(_MONITORING, PROMETHEUS_RULE, name, {"spec": rule}, more_labels=options.rule_labels)


def _cache_claim(build: _Builder, name: str) -> Manifest | None:
    cache = build.spec.model.cache
    if not isinstance(cache, NewClaim):
        return None
    content: JSON = {
        "accessModes": [cache.access_mode.value],
        "resources": {"requests": {"storage": str(cache.size_bytes)}},
    }
    if cache.storage_class_name is not None:
        content["storageClassName"] = cache.storage_class_name
    return build.manifest("v1", "PersistentVolumeClaim", name, {"spec": content})
