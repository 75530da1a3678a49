"""Long streams: started one after another, with the requested length, on the clock of the other traffic."""

from e2e_support.long_streams import begin_one_by_one, long_streams, tokens_lasting
from e2e_support.traffic import Traffic
from e2e_support.traffic.fake_server import PROMPT


def longer(server, beyond):
    """Return events that continue after the known tokens."""

    def go_on(events):
        *answer, last, usage, done = events
        asked = server.bodies[-1]["max_tokens"]
        assert asked == PROMPT.max_tokens + beyond
        choice = last["choices"][0]
        more = [{**last, "choices": [{**choice, "text": "…", "token_ids": [7] * beyond}]}]
        known = {**last, "choices": [{**choice, "finish_reason": None}]}
        drawn = usage["usage"]["completion_tokens"] + beyond
        told = {**usage["usage"], "completion_tokens": drawn, "total_tokens": usage["usage"]["prompt_tokens"] + drawn}
        return [*answer, known, *more, {**usage, "usage": told}, done]

    server.twist = go_on


def test_streams_start_one_after_another(server):
    longer(server, 9)
    server.pause_seconds = 0.1
    most_at_once: list[int] = []
    with long_streams(server.url, "demo", beyond=9, prompts=(PROMPT,)) as streams:

        def pause(seconds: float) -> None:
            assert seconds == 1.0
            started = len(most_at_once) + 1
            streams.wait_for(lambda live: server.most_at_once >= started, 30, f"{started} streams")
            most_at_once.append(server.most_at_once)

        begin_one_by_one(streams, 3, pause=pause)
    assert most_at_once == [1, 2, 3]
    assert {record.expected_tokens for record in streams.result.records} == {len(PROMPT.token_ids) + 9}


def test_further_streams_start_until_each_replica_has_one(server):
    longer(server, 9)
    server.pause_seconds = 0.5
    placed = iter(range(1, 5))
    with long_streams(server.url, "demo", beyond=9, prompts=(PROMPT,)) as streams:

        def pause(seconds: float) -> None:
            count = next(placed)
            streams.wait_for(lambda live: sum(live.streams.values()) == count, 30, f"{count} streams")
            server.replica = "llm/chat-0" if count < 3 else "llm/chat-1"

        begin_one_by_one(streams, 2, on={"llm/chat-0", "llm/chat-1"}, pause=pause)
        assert streams.live().streams == {"llm/chat-0": 3, "llm/chat-1": 1}
        server.pause_seconds = 0.0
    assert server.most_at_once == 4, "no more than needed"


def test_streams_use_the_clock_of_concurrent_traffic(server):
    longer(server, 9)
    with Traffic(server.url, model="demo", prompts=(PROMPT,), concurrency=0) as traffic:
        traffic.wait_for(lambda live: live.seconds >= 0.5, 10, "half a second")
        with long_streams(server.url, "demo", beyond=9, concurrency=1, beside=traffic, prompts=(PROMPT,)) as streams:
            streams.wait_for(lambda live: live.completed > 0, 10, "one")
        assert streams.result.records[0].started >= 0.5
        assert traffic.stop().seconds >= streams.result.records[0].ended


def test_token_count_follows_the_speed_of_the_machine(server):
    longer(server, 50)
    assert tokens_lasting(1e6, server.url, "demo", prompts=(PROMPT,)) == 3500, "at most what the model can"
    assert tokens_lasting(0.0, server.url, "demo", prompts=(PROMPT,)) == 50, "and so many that a stream lasts"
    server.pause_seconds = 0.05
    assert 50 < tokens_lasting(20.0, server.url, "demo", prompts=(PROMPT,)) <= 57 / (0.05 * 9) * 20.0
