"""Requests to the ``/livez`` of every server, from a process of its own that nothing else delays.

    python -m benchmarks.serving.livez_probe INTERVAL_SECONDS NAME=HOST:PORT …

It ends with its standard input, and prints what it found as JSON. ``late_ms`` is the longest time by which the probe's
own sleeps were too long: on a machine that is too busy, a server cannot answer sooner either.
"""

import http.client
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass


@dataclass
class Answers:
    """The answers of one server."""

    server: str
    num_answers: int = 0
    num_unanswered: int = 0
    """Requests to a server that was being started again."""
    longest_ms: float = 0.0
    num_over_100_ms: int = 0
    late_ms: float = 0.0
    num_late_over_50_ms: int = 0


def probe(found: Answers, host: str, port: int, interval: float, stop: threading.Event) -> None:
    """Ask until ``stop`` is set."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    while not stop.is_set():
        sent = time.monotonic()
        try:
            connection.request("GET", "/livez")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            found.num_unanswered += 1
        else:
            milliseconds = (time.monotonic() - sent) * 1000
            found.num_answers += 1
            found.longest_ms = max(found.longest_ms, milliseconds)
            found.num_over_100_ms += milliseconds > 100
        before = time.monotonic()
        time.sleep(interval)
        late = (time.monotonic() - before - interval) * 1000
        found.late_ms = max(found.late_ms, late)
        found.num_late_over_50_ms += late > 50
    connection.close()


def main(argv: list[str]) -> None:
    interval = float(argv[0])
    stop = threading.Event()
    answers, threads = [], []
    for target in argv[1:]:
        name, _, address = target.partition("=")
        host, _, port = address.rpartition(":")
        answers.append(Answers(server=name))
        threads.append(threading.Thread(target=probe, args=(answers[-1], host, int(port), interval, stop)))
        threads[-1].start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps([asdict(each) for each in answers]))


if __name__ == "__main__":
    main(sys.argv[1:])
