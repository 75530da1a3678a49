"""The operator's decisions as Prometheus recorded them."""

import httpx

from quire_cluster.real_cluster import RealCluster

AUTOSCALING = "quire_operator_autoscaling_"


def recorded_decisions(machine: RealCluster, namespace: str) -> list[int]:
    """Return the desired replicas that consecutive leaders decided in the last 15 minutes, each change once.

    Do not use `max` over the operators: Prometheus keeps the last sample of a dead one for five minutes.
    """
    query = f"{AUTOSCALING}desired_replicas{{namespace='{namespace}'}}[15m]"
    url = f"{machine.prometheus_url}/api/v1/query"
    answer = httpx.get(url, params={"query": query}, trust_env=False).raise_for_status().json()
    samples = sorted((time, int(value)) for series in answer["data"]["result"] for time, value in series["values"])
    values = [value for _, value in samples]
    return [value for before, value in zip([None, *values], values, strict=False) if value != before]
