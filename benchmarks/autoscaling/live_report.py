"""What the live runs were, as a table and as one picture: load, replicas and first tokens of each run on one clock."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from live_run import Event, Record, decisions, moment, ready_replicas

_TITLES = {
    "plain": "undisturbed",
    "prometheus": "Prometheus killed for two minutes",
    "engine": "an engine killed -9",
}
_BLIND = ("MetricsStale", "MetricsPartial")


def markdown(records: Sequence[Record], wrongs: Mapping[str, Sequence[str]]) -> str:
    """A row for each run, then every change with its reason."""
    lines = [
        "| run | requests | failed | TTFT p50 / p95 | most replicas | changes | ticks without fresh figures "
        "| scale-downs among them | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(record, wrongs[record.case]) for record in records]
    for record in records:
        lines += ["", f"{_TITLES[record.case]}:", "", "| at | what | why |", "|---|---|---|"]
        lines += [f"| {at - record.start:.0f} s | {what} | {why} |" for at, what, why in _story(record)]
    return "\n".join(lines) + "\n"


def _row(record: Record, wrongs: Sequence[str]) -> str:
    summary, said = record.bench["summary"], decisions(record.events)
    blind = [event for event in said if event["inputs"]["fresh"] < event["inputs"]["ready"]]
    ttft = summary["ttft_seconds"]
    cells = (
        _TITLES[record.case],
        f"{summary['requests']} (each {record.every}.)",
        f"{sum(outcome['error'] is not None for outcome in record.bench['requests'])}",
        f"{ttft['p50']:.2f} / {ttft['p95']:.2f} s",
        f"{max(event['to'] for event in said)}",
        f"{sum(event['changed'] for event in said)}",
        f"{len(blind)}",
        f"{sum(event['to'] < event['from'] for event in blind)}",
        "; ".join(wrongs) or "nothing",
    )
    return f"| {' | '.join(cells)} |"


def _story(record: Record) -> list[tuple[float, str, str]]:
    """What was done, every change, and every turn of the reason to or from having no figures."""
    told = [(at, f"**{what}**", "") for at, what in record.marks]
    before = ""
    for event in decisions(record.events):
        turned = (event["reason"] in _BLIND) != (before in _BLIND)
        if event["changed"] or turned:
            what = f"{event['from']} → {event['to']}" if event["changed"] else f"held at {event['to']}"
            told.append((moment(event), what, f"{event['reason']}: {event['message'].split(': ', 2)[-1]}"))
        before = event["reason"]
    return sorted(told)


def draw(records: Sequence[Record], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(records), 9), layout="constrained")
    figure.suptitle("Replicas scaled by a real Prometheus")
    columns = figure.subplots(3, len(records), sharex="col", squeeze=False)
    for index, record in enumerate(records):
        load, count, first = (row[index] for row in columns)
        load.set_title(_TITLES[record.case])
        _draw_load(load, record)
        _draw_replicas(count, record)
        _draw_first_tokens(first, record)
        for axis in (load, count, first):
            for at, _ in record.marks:
                axis.axvline(at - record.start, color="0.6", linewidth=0.8, linestyle=":")
        end = max(moment(decisions(record.events)[-1]), *(at for at, _ in record.marks)) - record.start
        for number, (at, what) in enumerate(sorted(record.marks)):
            side = "right" if at - record.start > 0.7 * end else "left"
            text = count.text(at - record.start, 4.7 - 0.35 * number, f" {what} ", fontsize=8, ha=side)
            text.set_in_layout(False)
        first.set_xlabel("seconds since the first request")
        first.set_xlim(-15, end + 10)
    columns[0][0].set_ylabel("requests sent per 5 s")
    columns[1][0].set_ylabel("replicas")
    columns[2][0].set_ylabel("time to first token (s)")
    named = {label: line for axis in columns[1] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_load(axis: Any, record: Record) -> None:
    outcomes = record.bench["requests"]
    last = int(max(outcome["end_seconds"] for outcome in outcomes)) + 5
    axis.hist([outcome["sent_seconds"] for outcome in outcomes], bins=range(0, last, 5), color="tab:blue", alpha=0.6)


def _draw_replicas(axis: Any, record: Record) -> None:
    said = decisions(record.events)
    for begin, end in _blind_spans(said):
        label = "no fresh figures: held" if begin == _blind_spans(said)[0][0] else None
        axis.axvspan(begin - record.start, end - record.start, color="gold", alpha=0.35, label=label)
    steps = [(at - record.start, number) for at, number in ready_replicas(record.events) if at < moment(said[-1]) + 1]
    axis.step([at for at, _ in steps], [n for _, n in steps], where="post", label="ready", color="tab:green")
    wanted = [(moment(event) - record.start, event["to"]) for event in said]
    axis.step(
        [at for at, _ in wanted], [n for _, n in wanted], where="post", linestyle="--", label="decided", color="k"
    )
    axis.plot([at for at, _ in wanted], [n for _, n in wanted], "k.", markersize=4)
    axis.set_ylim(0, 5)
    axis.set_yticks(range(4))


def _blind_spans(said: Sequence[Event]) -> list[tuple[float, float]]:
    """From the first tick without fresh figures to the first one with them again."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for event in said:
        blind = event["reason"] in _BLIND
        if blind and begin is None:
            begin = moment(event)
        if not blind and begin is not None:
            spans.append((begin, moment(event)))
            begin = None
    return spans if begin is None else [*spans, (begin, moment(said[-1]))]


def _draw_first_tokens(axis: Any, record: Record) -> None:
    outcomes = record.bench["requests"]
    timed = [(o["sent_seconds"], o["first_token_seconds"] - o["sent_seconds"]) for o in outcomes if o["error"] is None]
    axis.plot([at for at, _ in timed], [value for _, value in timed], ".", markersize=3)
    failed = [o["end_seconds"] for o in outcomes if o["error"] is not None]
    axis.plot(failed, [0.0] * len(failed), "rx", label=f"{len(failed)} failed")
    axis.set_ylim(-0.03 * axis.get_ylim()[1], None)
    axis.legend(loc="upper right", fontsize=8)
