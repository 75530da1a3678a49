"""The gateway's request counts and its command line in local mode; tests/contract compares them with the gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec


class _Counts(msgspec.Struct, frozen=True, rename="camel"):
    held: int = 0
    in_flight: int = 0


class _Page(msgspec.Struct, frozen=True):
    models: dict[str, _Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequests:
    """The requests that gateways have, by served model name; a model without any is absent."""

    held: Mapping[str, int]
    """Requests that wait because no replica can accept them."""
    in_flight: Mapping[str, int]
    """Requests that a replica processes."""
    is_complete: bool = True
    """True if all gateways are counted, so that an absent model has no requests."""


def read_requests(body: bytes) -> GatewayRequests:
    """Return the requests in one gateway's answer. Raises ``ValueError``."""
    models = msgspec.json.decode(body, type=_Page).models
    return GatewayRequests(
        held={model: counts.held for model, counts in models.items() if counts.held > 0},
        in_flight={model: counts.in_flight for model, counts in models.items() if counts.in_flight > 0},
    )


def summed(answers: Sequence[GatewayRequests | None]) -> GatewayRequests | None:
    """Return the sum over gateways. None stands for a gateway without an answer, and is the sum if none answered."""
    known = [answer for answer in answers if answer is not None]
    if not known:
        return None
    held: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    for answer in known:
        for total, part in ((held, answer.held), (in_flight, answer.in_flight)):
            for model, count in part.items():
                total[model] = total.get(model, 0) + count
    return GatewayRequests(held=held, in_flight=in_flight, is_complete=len(known) == len(answers))


def local_gateway_args(*, host: str, port: int, endpoints_file: str, drain_timeout_seconds: float) -> list[str]:
    """Return the arguments of a gateway in front of local replicas, without the command itself."""
    return [
        *("--host", host, "--port", str(port)),
        *("--endpoints-file", endpoints_file),
        *("--drain-timeout", f"{drain_timeout_seconds:g}"),
    ]
