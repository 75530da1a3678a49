"""What the operator's distribution and the gateway have agreed on. Held to the real gateway by tests/contract."""

GATEWAY_COMMAND = "quire-gateway"
LIVE_PATH = "/livez"
"""200 while it runs, whether it knows a replica or not."""


def local_gateway_args(*, host: str, port: int, endpoints_file: str, drain_timeout_seconds: float) -> list[str]:
    """The arguments of a gateway in front of local replicas, without the command itself."""
    return [
        *("--host", host, "--port", str(port)),
        *("--endpoints-file", endpoints_file),
        *("--drain-timeout", f"{drain_timeout_seconds:g}"),
    ]
