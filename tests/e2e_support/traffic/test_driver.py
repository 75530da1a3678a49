"""The driver keeps its rate, knows running requests, asserts at the end, and describes failures in one line."""

import asyncio
import time

import pytest
from aiohttp import web

from e2e_support.traffic import CUT, FailureKind, Form, Permit, Traffic, TrafficFailed
from e2e_support.traffic.fake_server import CHAT, PROMPT, begin, right_events, written


def flowing(server, **changes):
    asked = {"concurrency": 2, "prompts": (PROMPT,), "forms": (Form.STREAM,), **changes}
    return Traffic(server.url, model="demo", **asked)


def over(count):
    return lambda live: live.completed + live.failed >= count


def test_all_prompts_and_forms_are_sent_and_correct(server):
    with flowing(server, prompts=(PROMPT, CHAT), forms=tuple(Form), concurrency=3) as traffic:
        traffic.wait_for(over(12), 20, "two rounds")
    result = traffic.result
    seen = {(record.prompt, record.form) for record in result.records}
    assert seen == {(prompt, form) for prompt in ("plain", "chat") for form in Form}
    assert [record.number for record in result.records] == list(range(len(result.records)))
    assert server.most_at_once <= 3
    salts = [body.get("cache_salt") for body in server.bodies]
    assert None in salts and len({salt for salt in salts if salt}) == sum(map(bool, salts)), "each salt once"


def test_concurrency_is_kept_and_can_be_changed(server):
    server.pause_seconds = 0.02
    with flowing(server, concurrency=2) as traffic:
        traffic.wait_for(over(4), 20, "some answers")
        assert server.most_at_once == 2
        traffic.set_concurrency(5)
        traffic.wait_for(lambda live: live.in_flight == 5, 20, "five under way")
        traffic.pause()
        traffic.wait_for(lambda live: live.in_flight == 0, 20, "none under way")
    assert server.most_at_once == 5


def test_request_rate_is_kept_despite_failures(server):
    server.pause_seconds = 0.05
    with flowing(server, concurrency=None, rate=20.0) as traffic:
        traffic.wait_for(lambda live: live.seconds >= 2.0, 20, "two seconds")
        traffic.set_rate(0.0)
        begun = traffic.live().in_flight + traffic.live().completed
    starts = [record.started for record in traffic.result.records]
    # Requests are due at 0, 0.05, …: a busy machine delays some, but none is lost.
    assert 30 <= begun <= 20.0 * traffic.result.seconds + 2
    assert starts == sorted(starts)


def test_failures_are_reported_with_position_time_and_mark(server):
    server.twist = lambda events: [*events[:3], events[2], *events[3:]]
    with pytest.raises(TrafficFailed) as failure, flowing(server, at_least=0) as traffic:
        traffic.mark("the fault")
        traffic.wait_for(over(1), 20, "an answer")
    lines = str(failure.value).splitlines()
    assert lines[0].endswith("requests failed, and nothing permits it:")
    assert "request 00000 (plain, stream) on llm/chat-0, 0." in lines[1]
    assert "s after “the fault”: wrong answer: chunk 3: at character 19 expected" in lines[1]


def test_too_few_responses_fail_the_run(server):
    traffic = flowing(server, concurrency=0)
    with pytest.raises(TrafficFailed, match="only 0 requests completed; less than 1 proves nothing"), traffic:
        pass


def test_scenario_error_takes_precedence_over_traffic_errors(server):
    server.twist = lambda events: events[:-1]
    with pytest.raises(ZeroDivisionError) as error, flowing(server) as traffic:
        traffic.wait_for(over(1), 20, "an answer")
        raise ZeroDivisionError
    assert "requests had failed" in error.value.__notes__[0]


def test_manually_stopped_traffic_is_not_checked_at_exit(server):
    server.twist = lambda events: events[:-1]
    with flowing(server) as traffic:
        traffic.wait_for(over(1), 20, "an answer")
        result = traffic.stop()
    with pytest.raises(TrafficFailed):
        result.assert_all_right()


def test_active_streams_are_counted_by_replica(server):
    server.pause_seconds = 0.05
    with flowing(server, concurrency=3) as traffic:
        live = traffic.wait_for(lambda live: live.streams.get("llm/chat-0") == 3, 20, "three streams on it")
        moment = traffic.mark("looked")
    assert live.in_flight == 3
    assert 1 <= len(traffic.result.streams_during(moment)["llm/chat-0"]) <= 3


def test_wait_timeout_names_the_condition_and_the_state(server):
    with flowing(server) as traffic, pytest.raises(TimeoutError, match=r"not within 0.05 s: the moon; now Live\("):
        traffic.wait_for(lambda live: False, 0.05, "the moon")


def permit(**changes):
    asked = {"why": "it ran there", "kinds": CUT, "after": "kill", "within_seconds": 20.0, "replica": "llm/chat-0"}
    return Permit(**asked | changes)


PERMITS = {
    "what happened": (permit(), True),
    "on another replica": (permit(replica="llm/chat-1"), False),
    "too early": (permit(within_seconds=0.0), False),
    "after what never was": (permit(after="another"), False),
    "other kinds": (permit(kinds=frozenset({FailureKind.STALLED})), False),
    "fewer": (permit(at_most=0), False),
    "none": (None, False),
}


@pytest.mark.parametrize(("permit", "is_right"), PERMITS.values(), ids=PERMITS)
def test_only_permitted_requests_may_fail(server, permit, is_right):
    async def reset(request):
        response = await begin(request)
        await response.write(written(right_events(await request.json())[0]))
        await asyncio.sleep(0.02)
        request.transport.abort()
        return response

    with flowing(server, concurrency=1) as traffic:
        traffic.wait_for(over(2), 20, "answers")
        traffic.mark("kill")
        server.handler = reset
        traffic.wait_for(lambda live: live.failed >= 1, 20, "a failure")
        server.handler = None
        result = traffic.stop()
    permits = [] if permit is None else [permit]
    if is_right:
        result.assert_all_right(*permits)
    else:
        with pytest.raises(TrafficFailed, match="broken connection"):
            result.assert_all_right(*permits)


def test_a_wrong_answer_cannot_be_permitted():
    with pytest.raises(ValueError, match="a wrong answer cannot be permitted"):
        permit(kinds=frozenset({FailureKind.WRONG}))


def test_recovery_time_is_measured_from_the_mark(server):
    async def refuse(request):
        return web.json_response({"error": {}}, status=503)

    with flowing(server, concurrency=1) as traffic:
        traffic.wait_for(over(1), 20, "an answer")
        server.handler = refuse
        traffic.mark("down")
        traffic.wait_for(lambda live: live.failed >= 2, 20, "two refused")
        before = traffic.live().completed
        server.handler = None
        traffic.wait_for(lambda live: live.completed > before, 20, "answers again")
        result = traffic.stop()
    again = result.served_again_after("down")
    assert again is not None and 0.2 < again < 10
    assert result.longest_gap() >= 0.2
    down = result.seconds_of("down")
    everything = permit(kinds=frozenset({FailureKind.STATUS}), replica=None, after="down", within_seconds=10.0)
    result.assert_all_right(everything)
    assert all(record.started >= down - 1 for record in result.failures)


def test_request_costs_little_cpu_time(server):
    """Next to engines on two cores, the driver must not measure itself."""
    began = time.process_time()
    with flowing(server, concurrency=4) as traffic:
        traffic.wait_for_answers(200, "of the server, whose thread counts as well")
    assert time.process_time() - began < 0.02 * len(traffic.result.records)
