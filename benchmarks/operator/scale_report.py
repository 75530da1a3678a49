"""Report the operator's figures next to those of the bare loop, as medians over the runs."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def summary(bare: Sequence[Row], operator: Sequence[Row]) -> list[tuple[str, str]]:
    def median(rows: Sequence[Row], name: str) -> float:
        return statistics.median(row[name] for row in rows)

    lines = []
    for name, what in (("applied_seconds", "all children applied"), ("serving_seconds", "all replicas ready")):
        ours, loops = median(operator, name), median(bare, name)
        lines.append((what, f"{ours:.0f} s; bare loop {loops:.0f} s; ratio {ours / loops:.2f}"))
    last = operator[-1]
    ours, loops = (median(rows, "cpu_seconds") + median(rows, "cluster_cpu_seconds") for rows in (operator, bare))
    processor_time = (
        f"{ours:.0f} s, {median(operator, 'cpu_seconds'):.0f} of them the operator's; bare loop {loops:.0f} s,"
        f" {median(bare, 'cpu_seconds'):.0f} its own; ratio {ours / loops:.2f}"
    )
    lines += [
        ("children", ", ".join(f"{count} {kind}" for kind, count in last["children"].items())),
        ("every status says so", f"{median(operator, 'told_seconds'):.0f} s"),
        ("writes until then", f"{sum(last['writes'].values())}: {last['writes']}"),
        ("processor time until then", processor_time),
        ("pass, p99, turns waited for", within(median(operator, "pass_p99_milliseconds"))),
        ("memory", f"{median(operator, 'megabytes'):.0f} MB resident, {median(operator, 'peak_megabytes'):.0f} peak"),
        (
            "quiet minute",
            f"{last['quiet_writes'] or 'no'} writes, {median(operator, 'quiet_cpu_percent'):.1f} % of a core",
        ),
        ("a scrape of /metrics", f"{median(operator, 'scrape_cpu_milliseconds'):.0f} ms of processor time"),
        ("restart", f"{median(operator, 'restart_seconds'):.0f} s, {last['restart_changed']} Deployments changed"),
        ("writes of the restart", str(last["restart_writes"] or "none")),
    ]
    return lines


def within(milliseconds: float) -> str:
    """Return the bound as text; the last bucket has no bound."""
    return "over 10 s" if milliseconds == float("inf") else f"at most {milliseconds:.0f} ms"
