"""The autoscaler live: a slice of a production trace on ``quire up`` with a real Prometheus in the loop, and faults.

Three runs on one machine, each a ramp from one replica to three and back: undisturbed; with Prometheus killed in the
ramp for two minutes and started again; with an engine killed (-9) in the ramp. Judged strictly on what would be wrong
(a scale-down that no fresh figures ask for, a decision without its reason, replicas or explanations that do not come
back) and not at all on speed. Ends with 1 if anything was wrong. Writes OUT/live.md, OUT/live.png and what each run
said; Prometheus is the one on the PATH, else Debian's package.

    python benchmarks/autoscaling/live.py [--case plain --case prometheus --case engine] [--out out/live] [--plot PNG]
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from live_report import draw, markdown
from live_run import (
    ROOT,
    Event,
    Load,
    PrometheusServer,
    Record,
    Served,
    decisions,
    live,
    moment,
    ready_replicas,
)

KILLED, RESTARTED = "Prometheus killed", "Prometheus restarted"
ENGINE_KILLED, ENGINE_BACK = "chat-0 killed -9", "chat-0 ready again"
_OUTAGE_SECONDS = 120.0
_UP_SECONDS = 150.0
_BLIND = ("MetricsStale", "MetricsPartial")


def undisturbed(served: Served, prometheus: PrometheusServer, record: Record) -> None:
    """The load alone."""


def without_prometheus(served: Served, prometheus: PrometheusServer, record: Record) -> None:
    """Killed as soon as there is a second replica asked for."""
    served.wait_for(_is_scaled_up, _UP_SECONDS)
    prometheus.kill()
    record.mark(KILLED)
    time.sleep(_OUTAGE_SECONDS)
    prometheus.start()
    record.mark(RESTARTED)


def without_an_engine(served: Served, prometheus: PrometheusServer, record: Record) -> None:
    """The first replica, as soon as there is a second one asked for."""
    served.wait_for(_is_scaled_up, _UP_SECONDS)
    seen = len(record.events)
    os.kill(served.replica_pid("chat-0"), signal.SIGKILL)
    record.mark(ENGINE_KILLED)

    def is_back(events: list[Event]) -> bool:
        told = [event["phase"] for event in events[seen:] if event["event"] == "phase" and event["process"] == "chat-0"]
        return "Failed" in told and told[-1] == "Ready"

    if served.wait_for(is_back, 120):
        record.mark(ENGINE_BACK)


CASES: dict[str, Callable[[Served, PrometheusServer, Record], None]] = {
    "plain": undisturbed,
    "prometheus": without_prometheus,
    "engine": without_an_engine,
}


def _is_scaled_up(events: list[Event]) -> bool:
    return any(event["to"] > 1 for event in decisions(events))


def wrongs(record: Record) -> list[str]:
    """Everything that was wrong; nothing in a good run."""
    said = decisions(record.events)
    found = [f"a decision without a reason: {event}" for event in said if not (event["reason"] and event["message"])]
    found += [f"fewer replicas without fresh figures of all: {event['message']}" for event in said if _is_blind(event)]
    peak = max((event["to"] for event in said), default=0)
    if peak < 3:
        found.append(f"the ramp reached {peak} replicas only: there was nothing to judge; raise --scale-output")
    if record.marked("back at 1") is None:
        found.append("the replicas did not come back to one")
    failed = _errors(record)
    match record.case:
        case "plain":
            found += [f"{len(failed)} requests failed without a fault: {failed[0]['error']}"] if failed else []
        case "prometheus":
            found += [f"{len(failed)} requests failed, though no replica did: {failed[0]['error']}"] if failed else []
            found += _outage_wrongs(record)
        case "engine":
            found += _engine_wrongs(record, failed)
    return found


def _is_blind(event: Event) -> bool:
    return event["to"] < event["from"] and (
        event["inputs"]["fresh"] < event["inputs"]["ready"] or event["reason"] in _BLIND
    )


def _outage_wrongs(record: Record) -> list[str]:
    killed, restarted = record.marked(KILLED), record.marked(RESTARTED)
    if killed is None or restarted is None:
        return ["Prometheus was not killed and started again"]
    said = decisions(record.events)
    down = [event for event in said if killed <= moment(event) <= restarted and event["to"] < event["from"]]
    found = [f"fewer replicas while Prometheus was away: {event['message']}" for event in down]
    during = [told for told in record.explained if killed <= told["asked"] <= restarted]
    if not any(told["now"]["reason"] == "MetricsStale" for told in during):
        found.append("quire explain never said MetricsStale while Prometheus was away")
    if not any((told["now"]["metrics"] or {}).get("problem") for told in during):
        found.append("quire explain never said why there were no metrics")
    history = [stretch["last"]["reason"] for stretch in record.explained[-1]["history"]]
    if "MetricsStale" not in history or history[-1] == "MetricsStale":
        found.append(f"quire explain does not tell the outage and the recovery: {history}")
    return found


def _engine_wrongs(record: Record, failed: Sequence[Event]) -> list[str]:
    killed, back = record.marked(ENGINE_KILLED), record.marked(ENGINE_BACK)
    if killed is None or back is None:
        return ["the killed engine did not become ready again"]
    said = decisions(record.events)
    down = [event for event in said if killed <= moment(event) <= back and event["to"] < event["from"]]
    found = [f"fewer replicas while an engine was away: {event['message']}" for event in down]
    if not any(notice["subject"] == "chat-0" for told in record.explained for notice in told["notices"]):
        found.append("quire explain never said that chat-0 had failed")
    # What it was answering is lost with it; whatever was sent to it before the gateway knew, likewise.
    for outcome in failed:
        sent, end = record.start + outcome["sent_seconds"], record.start + outcome["end_seconds"]
        if not (sent <= killed + 5 and end >= killed - 1):
            found.append(f"a request failed that was not under way when the engine was killed: {outcome['error']}")
    return found


def _errors(record: Record) -> list[Event]:
    return [outcome for outcome in record.bench["requests"] if outcome["error"] is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; may be repeated (default all)")
    parser.add_argument("--out", type=Path, default=Path("out/live"), help="folder of the results (default out/live)")
    parser.add_argument("--plot", type=Path, help="the picture (default OUT/live.png)")
    parser.add_argument("--trace", type=Path, default=ROOT / "benchmarks/kv/azure_llm_2023_code_slice.csv")
    parser.add_argument("--start-seconds", type=float, default=180.0, help="skip this much of the trace (default 180)")
    parser.add_argument("--duration-seconds", type=float, default=170.0, help="use this much of it (default 170)")
    parser.add_argument("--every", type=int, help="send each so-manieth request (default by the speed measured)")
    parser.add_argument("--scale-input", type=float, default=0.1, help="prompt lengths times this (default 0.1)")
    parser.add_argument("--scale-output", type=float, default=5.0, help="answer lengths times this (default 5)")
    arguments = parser.parse_args()
    load = Load(
        trace=arguments.trace,
        start_seconds=arguments.start_seconds,
        duration_seconds=arguments.duration_seconds,
        every=arguments.every,
        scale_input=arguments.scale_input,
        scale_output=arguments.scale_output,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever was started is ended
    records: list[Record] = []
    found: dict[str, list[str]] = {}
    for case in arguments.case or list(CASES):
        print(f"{case}:", flush=True)
        record = live(case, load, (arguments.out / case).resolve(), meddle=CASES[case])
        records.append(record)
        load = replace(load, every=record.every)  # the same for all
        found[case] = wrongs(record)
        for wrong in found[case]:
            print(f"  WRONG: {wrong}", flush=True)
        print(f"  peak {max(count for _, count in ready_replicas(record.events))} ready", flush=True)
    text = markdown(records, found)
    (arguments.out / "live.md").write_text(text)
    draw(records, arguments.plot or arguments.out / "live.png")
    print(text)
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
