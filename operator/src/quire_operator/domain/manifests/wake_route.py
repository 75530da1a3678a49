"""The route from the Service of an LLMDeployment to the gateways, while no replica is ready. Pure.

It is an EndpointSlice of the Service with the addresses of the gateways, so that a request to ``status.endpoint``
wakes the model as a request to the gateway does (ADR 0098). The slice lacks the label by which gateways find replicas,
so no gateway sends a request to itself. Kubernetes' own controller leaves slices of other managers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_common.contract import engine
from quire_operator.domain.cluster_state.observed import Pod
from quire_operator.domain.manifests.objects import digest, owner_reference
from quire_operator.domain.resource import Spec, names
from quire_operator.domain.resource.times import parse_time
from quire_operator.domain.resource.untyped import JSON

API_VERSION, KIND, PLURAL = "discovery.k8s.io/v1", "EndpointSlice", "endpointslices"
MANAGER_LABEL, MANAGER = "endpointslice.kubernetes.io/managed-by", "quire-operator"
SUFFIX = "-wake"
READY_SECONDS = 5.0
"""A replica must be ready for this long before the route goes, because every node must learn its address first."""
_MOST_GATEWAYS = 100


@dataclass(frozen=True, slots=True, order=True)
class GatewayAddress:
    """The address at which a gateway accepts requests for Services."""

    ip: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeRoute:
    """An EndpointSlice to apply."""

    name: str
    body: JSON

    @property
    def digest(self) -> str:
        """A hash that is equal for equal bodies."""
        return digest(dict(self.body))


def needs_route(spec: Spec, pods: Sequence[Pod], *, desired_replicas: int | None, now: float) -> bool:
    """Return whether requests to the Service should go to the gateways.

    ``desired_replicas`` is the last decision of the autoscaler: at zero the route exists before the last replica ends.
    """
    if spec.autoscaling is None or spec.only_recommends or not spec.autoscaling.may_reach_zero:
        return False
    return desired_replicas == 0 or not any(_is_settled(pod, now) for pod in pods)


def wake_route(spec: Spec, uid: str, gateways: Sequence[GatewayAddress]) -> WakeRoute:
    """Return the route of the LLMDeployment with this ``uid`` to these gateways, of which there is at least one.

    A slice has addresses of one family and ports that all of them share: those of the first gateway count.
    """
    first = min(gateways)
    is_ipv6 = ":" in first.ip
    chosen = sorted(each for each in gateways if each.port == first.port and (":" in each.ip) == is_ipv6)
    name = f"{spec.name}{SUFFIX}"
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": spec.namespace,
            "labels": {
                "kubernetes.io/service-name": spec.name,
                MANAGER_LABEL: MANAGER,
                names.LABEL_MANAGED_BY: "quire-operator",
            },
            "ownerReferences": [owner_reference(spec.name, uid)],
        },
        "addressType": "IPv6" if is_ipv6 else "IPv4",
        "ports": [{"name": engine.HTTP_PORT_NAME, "port": first.port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [each.ip], "conditions": {"ready": True}} for each in chosen[:_MOST_GATEWAYS]],
    }
    return WakeRoute(name=name, body=body)


def _is_settled(pod: Pod, now: float) -> bool:
    if not pod.ready or pod.deleting or pod.is_canary:
        return False
    since = parse_time(pod.ready_changed)
    return since is None or now - since >= READY_SECONDS  # a replica counts if nothing is known about the time
