"""The wire format of events."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.api import stream


@given(st.text())
def test_prepared_event_equals_the_encoded_event(text: str) -> None:
    def payload(text: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": None}

    assert stream.TextEvent(payload).event(text) == stream.event(payload(text))


@given(st.text())
def test_event_is_one_data_line_for_any_text(text: str) -> None:
    assert stream.event({"text": text}).splitlines()[1:] == [b""]
