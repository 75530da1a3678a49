"""A stream keeps its contents until they are read, and ends once."""

import asyncio

import pytest

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.errors import RequestTimeout, Unavailable
from quire_engine.ipc.stream import Stream

END = FinishedSequence(7, "length", None)


@pytest.fixture
def given_up() -> list[int]:
    return []


@pytest.fixture
def stream(given_up: list[int]) -> Stream:
    return Stream(7, give_up=given_up.append)


async def read(stream: Stream) -> list[int]:
    """Wait for output, and return its tokens."""
    await stream.wait()
    return stream.read()[0]


async def test_slow_reader_gets_all_tokens_in_one_read(stream: Stream) -> None:
    stream.first_scheduled(1.5, 16)
    for token_id in (4, 5, 6):
        stream.take(token_id, TokenLogprobs([token_id], [-1.0], 1))
    stream.finish(END)
    await stream.wait()
    token_ids, logprobs = stream.read()
    assert token_ids == [4, 5, 6] and [entry.token_ids for entry in logprobs or []] == [[4], [5], [6]]
    assert (stream.first_scheduled_time, stream.num_cached_tokens, stream.finished) == (1.5, 16, END)


async def test_reports_of_the_prompt_are_kept_together(stream: Stream) -> None:
    first, second, third = (TokenLogprobs([token_id], [-1.0], 1) for token_id in (1, 2, 3))
    stream.take_prompt_logprobs([first])
    stream.take_prompt_logprobs([second])
    assert await read(stream) == [] and stream.prompt_logprobs == [first, second]
    stream.take_prompt_logprobs([third])
    stream.take(4, None)
    assert await read(stream) == [4] and stream.prompt_logprobs == [first, second, third]


async def test_a_token_is_read_once(stream: Stream) -> None:
    stream.take(4, TokenLogprobs([4], [-1.0], 1))
    assert await read(stream) == [4]
    stream.take(5, None)
    await stream.wait()
    assert stream.read() == ([5], None)
    assert stream.read() == ([], None)


async def test_output_between_wait_and_read_is_read_and_announced(stream: Stream) -> None:
    """A reader of several streams reads after another one has waited."""
    stream.take(4, None)
    await stream.wait()
    stream.take(5, None)
    stream.finish(END)
    assert stream.read()[0] == [4, 5]
    await asyncio.wait_for(stream.wait(), timeout=1)
    assert stream.finished == END


async def test_reader_waits_for_new_tokens(stream: Stream) -> None:
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    assert not reading.done()
    stream.take(4, None)
    assert await reading == [4]


async def test_cancel_ends_a_pending_read_and_notifies_engine_once(stream: Stream, given_up: list[int]) -> None:
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    await reading
    assert stream.finished is not None and stream.finished.reason == "abort"
    assert given_up == [7]


async def test_cancel_after_the_end_does_not_notify_the_engine(stream: Stream, given_up: list[int]) -> None:
    stream.finish(END)
    stream.cancel()
    await stream.wait()
    assert stream.finished == END and given_up == []


async def test_tokens_sampled_before_a_failure_can_be_read(stream: Stream) -> None:
    stream.take(4, None)
    stream.fail(Unavailable("gone"))
    assert await read(stream) == [4]
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await stream.wait()


async def test_reader_that_was_cancelled_may_read_again(stream: Stream) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.wait(), timeout=0.01)
    stream.take(4, None)
    assert await read(stream) == [4]


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
    assert len(await read(stream)) == count
    with pytest.raises(RequestTimeout, match="read too slowly"):
        await stream.wait()


async def test_stream_read_periodically_has_no_length_limit(stream: Stream, given_up: list[int]) -> None:
    for _ in range(10):
        for _ in range(10_000):
            stream.take(4, None)
        assert len(await read(stream)) == 10_000
    assert given_up == []
