"""Logging: one line per event on standard error, as text for people or as JSON for machines.

What clients send gets into messages, so characters that end lines or control terminals are written as escapes.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json", "auto"]
"""``auto`` is text on a terminal and JSON elsewhere."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that a line belongs to."""
trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""The W3C trace that the request belongs to."""

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_AS_TEXT = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_AS_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS}


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._mark = "" if process is None else f"{process}: "

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        line = f"{time} {record.levelname.lower():7} {self._mark}{record.getMessage().translate(_AS_TEXT)}"
        if (current := request_id.get()) is not None:
            line += f" [{current}]"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._mark = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._mark,
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        if (trace := trace_id.get()) is not None:
            entry["trace_id"] = trace
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False).translate(_AS_JSON)


def log_handler(format: LogFormat = "auto", *, process: str | None = None) -> logging.Handler:
    """Return a handler for standard error; ``process`` marks the lines of one of several processes."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = format == "text" or (format == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextFormatter(process) if as_text else _JsonFormatter(process))
    return handler


def set_up_logging(level: str, format: LogFormat = "auto", *, process: str | None = None) -> None:
    """Log everything from ``level`` upwards to standard error, in place of what was set up before."""
    logging.basicConfig(level=level.upper(), handlers=[log_handler(format, process=process)], force=True)
