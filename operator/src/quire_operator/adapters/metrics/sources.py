"""The metrics of each replica from the source that its LLMDeployment selects, and the requests of the gateways.

It implements ``ports.Metrics`` with the other adapters in this folder.
"""

import asyncio
from collections.abc import Mapping, Sequence

from quire_operator.adapters.metrics.gateways import Gateways
from quire_operator.adapters.metrics.prometheus import Prometheus
from quire_operator.adapters.metrics.scrape import Scraper
from quire_operator.domain.autoscaling.gateway_contract import GatewayRequests
from quire_operator.domain.autoscaling.observation import ReplicaSample
from quire_operator.ports import ReplicaAddress


class MetricsSources:
    def __init__(self, *, pods: Scraper, prometheus: Prometheus | None, gateways: Gateways | None = None) -> None:
        self._pods, self._prometheus, self._gateways = pods, prometheus, gateways

    @property
    def has_prometheus(self) -> bool:
        return self._prometheus is not None

    @property
    def prometheus_problem(self) -> str | None:
        """The reason why Prometheus did not answer the last query; None if it did."""
        return None if self._prometheus is None else self._prometheus.problem

    async def aclose(self) -> None:
        await self._pods.aclose()
        if self._gateways is not None:
            await self._gateways.aclose()
        if self._prometheus is not None:
            await self._prometheus.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """See ``ports.Metrics``."""
        by_prometheus = [replica for replica in replicas if replica.by_prometheus]
        scraped, queried = await asyncio.gather(
            self._pods.samples([replica for replica in replicas if not replica.by_prometheus]),
            self._query(by_prometheus),
        )
        return {**scraped, **queried}

    async def _query(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        return {} if self._prometheus is None else await self._prometheus.samples(replicas)

    async def gateway_requests(self) -> GatewayRequests | None:
        """See ``ports.Metrics``."""
        return None if self._gateways is None else await self._gateways.requests()
