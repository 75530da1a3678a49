"""The metrics of adapters: vLLM's ``vllm:lora_requests_info``, and quire's own."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_common.contract.adapters_file import AdapterState
from quire_engine.server.adapters.service import AdapterService
from quire_engine.server.observability.metrics import Metrics

_LABELS = ["model_name", "engine"]
_ENGINE = "0"


class AdapterCollector(Collector):
    """A collector of the metrics of a server that serves adapters."""

    def __init__(self, metrics: Metrics, adapters: AdapterService) -> None:
        self._metrics = metrics
        self._adapters = adapters
        self._values = [metrics.model_name, _ENGINE]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry needs no description in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._adapters.report()
        stats = self._metrics.engine.latest
        running = [] if stats is None else stats.gauges.running_adapters
        waiting = [] if stats is None else stats.gauges.waiting_adapters
        requests = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the time of the report in Unix seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        requests.add_metric([str(report.slots.total), self._names(running), self._names(waiting)], time.time())
        yield requests
        slots = GaugeMetricFamily("quire_adapter_slots", "Slots for adapters by state.", labels=[*_LABELS, "state"])
        for state, count in (("used", report.slots.used), ("free", report.slots.total - report.slots.used)):
            slots.add_metric([*self._values, state], count)
        yield slots
        states = GaugeMetricFamily("quire_adapters", "Adapters by state.", labels=[*_LABELS, "state"])
        found = Counter(adapter.state for adapter in report.adapters)
        for each in AdapterState:
            states.add_metric([*self._values, each.lower()], found[each])
        yield states
        loads = CounterMetricFamily("quire_adapter_loads", "Adapters copied into slots.", labels=_LABELS)
        loads.add_metric(self._values, self._metrics.engine.counters().get("adapter_loads", 0.0))
        yield loads

    def _names(self, adapters: Iterable[int]) -> str:
        return ",".join(sorted({name for number in adapters if (name := self._adapters.name_of(number)) is not None}))
