"""A stream keeps its contents until they are read, and ends once."""

import asyncio

import pytest

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.errors import RequestTimeout, Unavailable
from quire_engine.ipc.stream import Stream, Update

END = FinishedSequence(7, "length", None)


@pytest.fixture
def given_up() -> list[int]:
    return []


@pytest.fixture
def stream(given_up: list[int]) -> Stream:
    return Stream(7, give_up=given_up.append)


async def test_slow_reader_gets_all_tokens_in_one_update(stream: Stream) -> None:
    stream.first_scheduled(1.5, 0)
    for token_id in (4, 5, 6):
        stream.take(token_id, TokenLogprobs([token_id], [-1.0], 1))
    stream.finish(END)
    update = await stream.read()
    assert update.token_ids == [4, 5, 6] and update.first_scheduled_time == 1.5 and update.finished == END
    assert [entry.token_ids for entry in update.logprobs or []] == [[4], [5], [6]]


async def test_reports_of_the_prompt_are_kept_together(stream: Stream) -> None:
    first, second, third = (TokenLogprobs([token_id], [-1.0], 1) for token_id in (1, 2, 3))
    stream.take_prompt_logprobs([first])
    stream.take_prompt_logprobs([second])
    assert (await stream.read()).prompt_logprobs == [first, second]
    stream.take_prompt_logprobs([third])
    stream.take(4, None)
    update = await stream.read()
    assert (update.prompt_logprobs, update.token_ids) == ([third], [4])
    stream.take(5, None)
    assert (await stream.read()).prompt_logprobs is None


async def test_updates_repeat_no_values(stream: Stream) -> None:
    stream.first_scheduled(1.5, 16)
    stream.take(4, None)
    assert await stream.read() == Update(token_ids=[4], first_scheduled_time=1.5, num_cached_tokens=16)
    stream.take(5, None)
    assert await stream.read() == Update(token_ids=[5])


async def test_reader_waits_for_new_tokens(stream: Stream) -> None:
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    assert not reading.done()
    stream.take(4, None)
    assert (await reading).token_ids == [4]


async def test_cancel_ends_a_pending_read_and_notifies_engine_once(stream: Stream, given_up: list[int]) -> None:
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    finished = (await reading).finished
    assert finished is not None and finished.reason == "abort"
    assert given_up == [7]


async def test_cancel_after_the_end_does_not_notify_the_engine(stream: Stream, given_up: list[int]) -> None:
    stream.finish(END)
    stream.cancel()
    assert (await stream.read()).finished == END and given_up == []


async def test_tokens_sampled_before_a_failure_can_be_read(stream: Stream) -> None:
    stream.take(4, None)
    stream.fail(Unavailable("gone"))
    assert (await stream.read()).token_ids == [4]
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await stream.read()


async def test_reader_that_was_cancelled_may_read_again(stream: Stream) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.read(), timeout=0.01)
    stream.take(4, None)
    assert (await stream.read()).token_ids == [4]


@pytest.mark.parametrize(("logprobs", "at_least"), [(None, 20_000), (20, 500)], ids=["tokens", "logprobs"])
async def test_unread_output_is_bounded_and_ends_the_stream(
    stream: Stream, given_up: list[int], logprobs: int | None, at_least: int
) -> None:
    entry = None if logprobs is None else TokenLogprobs([1] * (logprobs + 1), [-1.0] * (logprobs + 1), 1)
    count = 0
    while not given_up:
        stream.take(4, entry)
        count += 1
    assert given_up == [7] and at_least < count < 60_000
    assert len((await stream.read()).token_ids) == count
    with pytest.raises(RequestTimeout, match="read too slowly"):
        await stream.read()


async def test_stream_read_periodically_has_no_length_limit(stream: Stream, given_up: list[int]) -> None:
    for _ in range(10):
        for _ in range(10_000):
            stream.take(4, None)
        assert len((await stream.read()).token_ids) == 10_000
    assert given_up == []
