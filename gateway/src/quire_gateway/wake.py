"""Requests to the Service of an LLMDeployment that has no ready replica, which arrive on the port ``--wake-port``.

Under ``app``. The operator lists the gateways as endpoints of such a Service, so that a request to it wakes the model.
The ``Host`` header says which Service a client asked. It decides nothing that the client may not do: the port leads to
replicas as their Services do, and engines check their own keys. Pure except for ``find_service``.
"""

from collections.abc import Iterable, Mapping

from aiohttp import web

from quire_gateway.errors import BadRequest, UnknownModel
from quire_gateway.fleet import Fleet, Pool

SERVICE = web.RequestKey("service", str)
"""The key under which a request of the wake port stores the Service that it came for; "" if no Service is known."""
_SVC = "svc"


def find_service(request: web.Request, fleet: Fleet) -> str:
    """Return the Service that a request came for, as NAMESPACE/NAME; "" if its Host header names none that is known."""
    return service_named(request.headers.get("Host", ""), (pool.service for pool in fleet.pools.values()))


def service_named(host: str, services: Iterable[str]) -> str:
    """Return the Service of a Host header among these; "" without one.

    Clients write NAME.NAMESPACE, NAME.NAMESPACE.svc or NAME.NAMESPACE.svc.DOMAIN. From its own namespace a client may
    write NAME alone, which counts if one Service has that name.
    """
    known = {service for service in services if service}
    name, *rest = host.partition(":")[0].lower().rstrip(".").split(".")
    if not rest:
        found = [service for service in known if service.partition("/")[2] == name]
        return found[0] if len(found) == 1 else ""
    service = f"{rest[0]}/{name}"
    is_service_name = len(rest) == 1 or rest[1] == _SVC
    return service if is_service_name and service in known else ""


def pool_behind(service: str, pools: Mapping[str, Pool], model: str | None) -> Pool:
    """Return the pool that serves a model name, or no name, behind a Service. Names are those that its engines accept.

    Raises ``UnknownModel`` for a model of another LLMDeployment: its own Service serves it.
    """
    behind = {name: pool for name, pool in pools.items() if pool.service == service}
    if model is None:
        own = next((pool for pool in behind.values() if pool.adapter_of is None), None)
        if own is None:
            raise BadRequest('the body names no "model"', param="model", code="missing_required_parameter")
        return own
    namespace = service.partition("/")[0]
    found = behind.get(model) or behind.get(f"{namespace}/{model}")
    if found is None:
        raise UnknownModel(f"the model {model[:200]!r} does not exist; served models: {', '.join(sorted(behind))}")
    return found
