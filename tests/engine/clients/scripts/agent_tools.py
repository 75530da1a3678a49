"""The question, the tool and the type that the scripts of agent libraries share.

The server's model calls ``get_weather`` for the question, and its last answer contains what the tool returned.
"""

from typing import Literal

import pydantic

CITY = "Paris"
QUESTION = f"How is the weather in {CITY}?"
RESULT = "light rain"
calls: list[str] = []
"""The cities that the tool was called with."""


class Sky(pydantic.BaseModel):
    """A type with few values, which a small model completes under a grammar within a few tokens."""

    sky: Literal["rain", "sun"]
    warm: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    calls.append(city)
    return RESULT


def check(answer: object) -> None:
    """Check that the tool was called once with the city, and that the last answer uses its result."""
    assert calls == [CITY], calls
    assert isinstance(answer, str) and RESULT in answer, answer
    calls.clear()
