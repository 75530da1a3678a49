"""Traffic beside a scenario, and what is kept of it: what the cluster said meanwhile, the picture, the count."""

from collections.abc import Iterator
from contextlib import contextmanager

from e2e_support.results import Report
from e2e_support.space import LLMDeployment
from e2e_support.timeline import ClusterWatch, keep, sight_of, timeline
from e2e_support.traffic import Traffic


@contextmanager
def recorded(traffic: Traffic, report: Report, *deployments: LLMDeployment) -> Iterator[Traffic]:
    """Traffic that flows while the context lasts; every answer is asserted on at its end, and its timeline kept."""
    watch = ClusterWatch(sight_of(*deployments), traffic.now)
    try:
        with traffic, watch:
            yield traffic
    finally:
        result = traffic.stop()
        keep(timeline(report.scenario, result, replicas=watch.replicas, told=watch.told, blind=watch.blind))
        report.count_requests(len(result.records))
