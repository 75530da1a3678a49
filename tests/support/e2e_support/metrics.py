"""Metrics pages of operator, gateway and engine, queried by name and labels. Pure."""

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def values(self, name: str, /, **labels: str) -> list[float]:
        """Return the values of all series with this name (counters with _total) and these labels."""
        return [
            float(sample.value)
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name: str, /, **labels: str) -> float:
        """Return the sum of the values, or 0."""
        return sum(self.values(name, **labels))
