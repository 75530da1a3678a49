"""The interface of the gateway: its paths, its file of endpoints in local mode, and the figures of a canary."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

GATEWAY_COMMAND = "quire-gateway"
LIVE_PATH = "/livez"
"""200 while the gateway runs, whether it knows replicas or not."""
TRACKS_PATH = "/tracks"
"""The figures of both tracks of each model with a canary; needs no key."""
TRACK_HEADER = "X-Quire-Track"
"""A header of answers: the track that served the request, while its model has a canary."""
STABLE, CANARY = "stable", "canary"
REQUESTS_PATH = "/requests"
"""The number of requests of each model that wait and that run; needs no key."""
WAIT_COMMENTS_HEADER = "X-Quire-Wait-Comments"
"""A request header with a number of seconds: while a stream waits for its first token, a comment is sent that often. It
takes the place of the gateway's ``--wait-comments``; 0 sends none."""
TENANT_HEADER = "X-Quire-Tenant"
"""A header of requests to replicas: the tenant of the client's key at the gateway, as ``TENANT_VALUE``. Each
LLMDeployment gets other values, which only the gateway can compute."""
TENANT_VALUE = r"[0-9a-f]{64}"
ENGINE_KEY_HEADER = "X-Quire-Engine-Key"
"""A request header with the key of an engine, which the gateway passes on as ``Authorization: Bearer``. A gateway that
checks keys itself passes on no other key."""
SCRAPE_SECONDS = 1.0
"""The period in which the gateway scrapes the load of every replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address and the state of one replica, in terms of EndpointSlice conditions."""

    id: str
    url: str
    """Scheme, host and port, without a path."""
    ready: bool = True
    serving: bool = True
    """True if it answers requests; it may be terminating."""
    terminating: bool = False
    starting: bool = False
    """True while its start is known to go on: requests wait for it however long it takes."""
    track: str = STABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRoute:
    """The share of requests that the canary of a model gets."""

    revision: str
    """The revision that the canary runs: another one starts with new figures."""
    weight_percent: int
    compared_percent: float = 0.0
    """The share of the requests with temperature 0 that are repeated on both tracks to compare the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldPolicy:
    """The time and number of held requests of one model, while no replica is ready. None leaves it to the gateway."""

    timeout_seconds: float | None = None
    max_held: int | None = None
    start_up_seconds: float | None = None
    """The time in which a replica usually becomes ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoints:
    """The replicas of one model."""

    name: str
    endpoints: Sequence[Endpoint]
    hold: HoldPolicy = HoldPolicy()
    canary: CanaryRoute | None = None
    adapter_of: str | None = None
    """For an adapter: the model whose replicas serve it; "" if gateways route that model's name elsewhere. None for
    a model."""
    service: str = ""
    """The Service of its replicas in a cluster, as NAMESPACE/NAME; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsFile:
    """The content of an endpoints file."""

    models: Sequence[ModelEndpoints]


def render_endpoints(
    endpoints: Mapping[str, Sequence[Endpoint]],
    adapters: Mapping[str, Sequence[str]] | None = None,
    holds: Mapping[str, HoldPolicy] | None = None,
) -> str:
    """Return the text of an endpoints file with these models.

    ``adapters`` are the names of adapters by model, which have the hold policy of their model in ``holds``.
    """
    policies = {name: (holds or {}).get(name, HoldPolicy()) for name in endpoints}
    models = [ModelEndpoints(name=name, endpoints=found, hold=policies[name]) for name, found in endpoints.items()]
    models += [
        ModelEndpoints(name=name, endpoints=endpoints[model], hold=policies[model], adapter_of=model)
        for model, names in (adapters or {}).items()
        for name in names
        if model in endpoints
    ]
    return json.dumps(asdict(EndpointsFile(models=models)), indent=1)


EQUAL_LOAD = 0.1
"""The relative difference up to which the loads of two replicas count as equal. It stems from whole percentages."""
TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY = "timeToFirstToken", "interTokenLatency"
_GROWTH = math.log(1.05)
_SHORTEST_SECONDS = 1e-4
_MOST_BINS = 320


def bin_of(seconds: float) -> int:
    """Return the bin of a latency."""
    if seconds <= _SHORTEST_SECONDS:
        return 0
    return min(_MOST_BINS, int(math.log(seconds / _SHORTEST_SECONDS) / _GROWTH))


def bin_start(number: float) -> float:
    """Return the latency in seconds at which a bin starts; fractions are within a bin."""
    return _SHORTEST_SECONDS * math.exp(number * _GROWTH)
