"""Read an answer that arrives in pieces, with a check that its events follow one another as clients need them."""

import json
from typing import Any

from quire_engine.text.answers.reader import AnswerParser, Arguments, CallStart, Content, Event, Reasoning, joined

Answer = tuple[str, str, list[tuple[str, Any]]]
"""Content, reasoning, and the calls by name and arguments."""


def read(parser: AnswerParser, pieces: list[str]) -> Answer:
    """Return the sum of the events."""
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for events in [*map(parser.feed, pieces), parser.finish()]:
        for event in events:
            match event:
                case Content():
                    content += event.text
                case Reasoning():
                    reasoning += event.text
                case CallStart():
                    assert event.index == len(calls)
                    calls.append((event.name, ""))
                case Arguments():
                    assert event.index == len(calls) - 1 and event.text
                    calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, reasoning, [(name, _value(text)) for name, text in calls]


def events_of(parser: AnswerParser, pieces: list[str]) -> list[Event]:
    """Return the events, with neighbours of one kind joined."""
    return joined([event for events in [*map(parser.feed, pieces), parser.finish()] for event in events])


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return ("invalid", arguments)
