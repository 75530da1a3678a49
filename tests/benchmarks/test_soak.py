"""The expectations of the soak, its poisonable engine, and its probe of /livez."""

import json
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from benchmarks.serving.livez_probe import Answers, probe
from benchmarks.serving.soak import poisonable
from benchmarks.serving.soak.__main__ import details
from benchmarks.serving.soak.clients import Cut, PoisonAnswer, Tally
from benchmarks.serving.soak.expectations import Observed, judge, memory_medians
from benchmarks.serving.soak.memory import Sample
from benchmarks.serving.soak.servers import Death
from quire_engine.core.batch import Admission, Batch
from quire_engine.core.sampling_params import SamplingParams

POISON = PoisonAnswer(kind="crash", status=502, code="replica_failed")


def samples(*mib: float, role: str = "gateway") -> list[Sample]:
    """Return one sample for each part of 600 s."""
    width = 600 / len(mib)
    return [Sample(role=role, pid=1, seconds=(n + 0.5) * width, mib=each) for n, each in enumerate(mib)]


def tally(**changes: object) -> Tally:
    good = Tally(tenants=Counter(a=5, b=4), num_cancelled=3, poisons=[POISON])
    return replace(good, **changes)  # type: ignore[arg-type]


GOOD = Observed(
    seconds=600,
    tally=tally(cuts=[Cut(replica="chat-0", seconds=12, code="engine_stopped")]),
    deaths=[Death(replica="chat-0", seconds=10), Death(replica="chat-1", seconds=11)],
    num_engine_restarts=2,
    num_server_restarts=0,
    num_preemptions=7,
    left={"chat-0 quire_kv_blocks/used": 0.0},
    probes=[Answers(server="gateway", num_answers=100, longest_ms=20, late_ms=10)],
    memory=samples(50, 60, 60, 61),
)
LATE = Answers(server="gateway", longest_ms=150, late_ms=80, num_over_100_ms=1)
SLOW = replace(LATE, late_ms=10)


@pytest.mark.parametrize("errors", [{}, {"502 replica_failed": 3}])
def test_successful_soak_meets_every_expectation(errors: dict[str, int]) -> None:
    assert {each.verdict for each in judge(replace(GOOD, tally=replace(GOOD.tally, errors=Counter(errors))))} == {
        "held"
    }


def test_the_details_are_json_with_their_counts() -> None:
    written = json.loads(json.dumps(details(GOOD)))
    assert (written["tenants"], written["num_cancelled"]) == ({"a": 5, "b": 4}, 3)
    assert [death["replica"] for death in written["deaths"]] == ["chat-0", "chat-1"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"tally": tally(errors=Counter({"503 no_replica_ready": 1}))}, 0),
        (
            {
                "tally": tally(errors=Counter({"502 replica_failed": 1})),
                "deaths": GOOD.deaths[:1],
                "num_engine_restarts": 1,
            },
            0,
        ),
        ({"tally": tally(errors=Counter({"429 queue_full": 1}))}, 1),
        ({"tally": tally(broken=Counter({"ServerDisconnectedError": 1}))}, 1),
        ({"tally": tally(cuts=[Cut(replica="chat-2", seconds=12, code="engine_stopped")])}, 2),
        ({"tally": tally(cuts=[Cut(replica="chat-0", seconds=99, code="engine_stopped")])}, 2),
        ({"tally": tally(tenants=Counter(a=9))}, 3),
        ({"tally": tally(num_cancelled=0)}, 4),
        ({"tally": tally(poisons=[replace(POISON, status=200, code=None)])}, 5),
        ({"deaths": [*GOOD.deaths, Death(replica="chat-2", seconds=12)], "num_engine_restarts": 3}, 6),
        ({"num_engine_restarts": 3}, 7),
        ({"num_preemptions": 0}, 8),
        ({"left": {"chat-0 quire_kv_blocks/used": 2.0}}, 9),
        ({"probes": [SLOW]}, 10),
        ({"memory": samples(50, 60, 70, 80)}, 11),
    ],
)
def test_each_expectation_can_fail_alone(changes: dict[str, object], place: int) -> None:
    verdicts = [each.verdict for each in judge(replace(GOOD, **changes))]  # type: ignore[arg-type]
    assert [number for number, verdict in enumerate(verdicts) if verdict == "failed"] == [place]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"probes": [LATE]}, 10),
        ({"seconds": 120, "memory": [replace(each, seconds=each.seconds / 5) for each in GOOD.memory]}, 11),
    ],
)
def test_missing_measurements_are_not_judged(changes: dict[str, object], place: int) -> None:
    verdicts = [each.verdict for each in judge(replace(GOOD, **changes))]  # type: ignore[arg-type]
    assert [number for number, verdict in enumerate(verdicts) if verdict == "not judged"] == [place]
    assert "failed" not in verdicts


def test_memory_is_compared_by_role() -> None:
    engine = samples(1, 700, 900, 800, role="engine process")
    assert memory_medians([*GOOD.memory, *engine], 600) == {"gateway": (60, 61), "engine process": (700, 800)}


class CountingRunner:
    """A runner that counts its steps."""

    steps = 0

    def execute(self, batch: Batch) -> None:
        self.steps += 1

    def close(self) -> None:
        pass


def admitting(prompt: list[int]) -> Batch:
    admission = Admission(
        row=0,
        prompt_token_ids=prompt,
        output_token_ids=[],
        params=SamplingParams(max_tokens=4),
        seed=0,
        eos_token_ids=(),
    )
    return Batch(
        step=1,
        rows=[0],
        num_computed=[0],
        num_scheduled=[len(prompt)],
        token_ids=prompt,
        samples=[True],
        feedback_tokens=[],
        admitted=[admission],
        block_updates=(),
        released_rows=[],
    )


class Died(Exception):
    """The end of an engine process, in a test."""


def test_only_a_repeated_poison_kills_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(kind: str) -> None:
        raise Died(kind)

    monkeypatch.setattr(poisonable, "_die", die)
    counting = CountingRunner()
    runner = poisonable.PoisonableRunner(counting)  # type: ignore[arg-type]
    runner.execute(admitting([*poisonable.POISONS.values(), 5]))
    assert counting.steps == 1
    for kind, token in poisonable.POISONS.items():
        with pytest.raises(Died, match=kind):
            runner.execute(admitting([5, *[token] * poisonable.REPEATS]))
    assert counting.steps == 1


def test_the_probe_counts_answers_and_refusals() -> None:
    stop, asked = Event(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) == 4:
                stop.set()
            if len(asked) == 2:
                self.connection.close()
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    found = Answers(server="one")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        probe(found, "127.0.0.1", server.server_port, 0.0, stop)
        server.shutdown()
        serving.join()
    assert asked == ["/livez"] * 4
    assert (found.num_answers, found.num_unanswered) == (3, 1)
    assert found.longest_ms > 0
