"""The engine's load in a response header, for load balancers that ask: ORCA's ``endpoint-load-metrics``.

A request with ``endpoint-load-metrics-format: JSON`` (or ``TEXT``) is answered with it; the names are vLLM's.
"""

import json

from quire_engine.ipc.messages import Stats

ASKED_BY = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"


def load_report(format: str, stats: Stats | None) -> str | None:
    """The header's value; None for a format nobody knows, and while the engine has told nothing."""
    if stats is None:
        return None
    named = {
        "kv_cache_usage_perc": round(stats.kv_usage, 6),
        "num_requests_waiting": stats.num_waiting,
        "num_requests_running": stats.num_running,
    }
    match format.strip().upper():
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": named})
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case _:
            return None
