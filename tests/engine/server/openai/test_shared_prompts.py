"""Several answers to one prompt are distinguished from answers to several: a shared prompt is computed once."""

from collections.abc import Callable
from typing import Any

import pytest

Serving = Callable[..., Any]


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
