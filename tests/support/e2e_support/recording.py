"""Traffic during a scenario, and its recording: the cluster's messages, the plot, the count."""

from collections.abc import Iterator
from contextlib import contextmanager

from e2e_support.results import Report
from e2e_support.space import LLMDeployment
from e2e_support.timeline import ClusterWatch, keep, sight_of, timeline
from e2e_support.traffic import Traffic


@contextmanager
def recorded(traffic: Traffic, report: Report, *deployments: LLMDeployment) -> Iterator[Traffic]:
    """Run traffic while the context lasts; check every answer at the end and store the timeline."""
    watch = ClusterWatch(sight_of(*deployments), traffic.now)
    try:
        with traffic, watch:
            yield traffic
    finally:
        result = traffic.stop()
        keep(timeline(report.scenario, result, replicas=watch.replicas, messages=watch.messages, blind=watch.blind))
        report.count_requests(len(result.records))
