"""One line per event, as text or JSON, whatever clients put into a message."""

import json
import logging
from datetime import datetime

import pytest

from quire_common.logs import log_handler, request_id, trace_id


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("quire.part", logging.WARNING, "f.py", 1, message, args, None)


def test_json_line_has_the_fields_of_the_record() -> None:
    tokens = request_id.set("r7"), trace_id.set("t1")
    try:
        entry = json.loads(log_handler("json", process="engine").format(record("queue of %d is full", 3)))
    finally:
        request_id.reset(tokens[0])
        trace_id.reset(tokens[1])
    time = entry.pop("time")
    assert time.endswith("Z") and datetime.fromisoformat(time).tzinfo is not None
    assert entry == {
        "level": "warning",
        "logger": "quire.part",
        "message": "queue of 3 is full",
        "process": "engine",
        "request_id": "r7",
        "trace_id": "t1",
    }


def test_text_line_marks_process_and_request() -> None:
    token = request_id.set("r7")
    try:
        line = log_handler("text", process="engine").format(record("full"))
    finally:
        request_id.reset(token)
    assert line.endswith("warning engine: full [r7]")


@pytest.mark.parametrize("format", ["text", "json"])
def test_control_characters_cannot_end_a_line(format: str) -> None:
    line = log_handler(format).format(record("a\nb\x1b[2Jc\u2028d"))  # type: ignore[arg-type]
    assert len(line.splitlines()) == 1 and "\x1b" not in line


@pytest.mark.parametrize(("is_terminal", "starts_json"), [(True, False), (False, True)])
def test_auto_is_text_on_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, starts_json: bool) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    assert log_handler("auto").format(record("m")).startswith("{") is starts_json
