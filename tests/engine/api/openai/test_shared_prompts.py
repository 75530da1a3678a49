"""Several answers to one prompt are distinguished from answers to several: a shared prompt is computed once."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire_engine.core.batch import FinishedSequence
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.ipc.stream import Stream

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


@pytest.mark.parametrize(
    ("fields", "parents"),
    [
        pytest.param({}, [None], id="one answer"),
        pytest.param({"n": 3}, [None, 1, 1], id="three answers"),
        pytest.param({"prompt": ["Hi", "Yo"]}, [None, None], id="two prompts"),
        pytest.param({"prompt": ["Hi", "Yo"], "n": 2}, [None, 1, None, 3], id="two answers to each of two prompts"),
    ],
)
async def test_answers_to_one_prompt_name_the_first_of_them(
    serving: Serving, fields: dict[str, Any], parents: list[int | None]
) -> None:
    async with serving("ok") as server:
        assert (await server.complete(**fields)).status_code == 200
        assert [stream.routing["parent"] for stream in server.engine.streams] == parents


async def test_answers_to_one_chat_name_the_first_of_them(serving: Serving) -> None:
    async with serving("ok") as server:
        assert (await server.chat(n=3)).status_code == 200
        assert [stream.routing["parent"] for stream in server.engine.streams] == [None, 1, 1]


@pytest.mark.parametrize("pause", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 4])
async def test_answers_are_whole_whenever_their_tokens_arrive(
    serving: Serving, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch, n: int, pause: float
) -> None:
    """All tokens before the first read, some of them, or one after the other; answers end at different times."""
    chance = random.Random(n + pause)
    texts = ["".join(chance.choices("abcdef", k=chance.randint(1, 30))) for _ in range(n)]
    streams: list[Stream] = []

    async def report() -> None:
        left = [token_ids(text) for text in texts]
        while any(left):
            number = chance.choice([number for number in range(n) if left[number]])
            streams[number].take(left[number].pop(0), None)
            if not left[number]:
                streams[number].finish(FinishedSequence(number, "length", None))
            if chance.random() < pause:
                await asyncio.sleep(chance.choice((0, 0.002)))

    reporting: list[asyncio.Task[None]] = []

    def submit(prompt_token_ids: Sequence[int], params: SamplingParams, **routing: Any) -> Stream:
        streams.append(Stream(len(streams), give_up=lambda key: None))
        if len(streams) == n:
            reporting.append(asyncio.create_task(report()))
        return streams[-1]

    async with serving() as server:
        monkeypatch.setattr(server.engine, "submit", submit)
        seen = dict.fromkeys(range(n), "")
        async for chunk in await server.openai.completions.create(model="demo", prompt="Hi", n=n, stream=True):
            for choice in chunk.choices:
                seen[choice.index] += choice.text
        assert list(seen.values()) == texts
