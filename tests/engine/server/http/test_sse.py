"""The wire format of events."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.server.http import sse


@given(st.text())
def test_prepared_event_equals_the_encoded_event(text: str) -> None:
    def payload(text: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": None}

    assert sse.TextEvent(payload).event(text) == sse.event(payload(text))


@given(st.text())
def test_event_is_one_data_line_for_any_text(text: str) -> None:
    assert sse.event({"text": text}).splitlines()[1:] == [b""]
