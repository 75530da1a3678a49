"""Logging of both processes: one line an event on standard error, as text or as JSON, with the request's id.

What clients send gets into messages, so that characters which end lines or steer terminals are written as escapes.

The engine process marks its lines, so that one stream of the two can be told apart.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from quire_engine.config import LogOptions

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""The W3C trace the request belongs to."""


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
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._mark = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._mark,
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        if (trace := trace_id.get()) is not None:
            entry["trace_id"] = trace
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False).translate(_AS_JSON)


def _is_told_otherwise(record: logging.LogRecord) -> bool:
    # A stream that failed ends without its last chunk on purpose (``streaming``); uvicorn thinks it an error.
    return not str(record.msg).startswith("ASGI callable returned without completing response")


def formatter(format: Literal["text", "json"], *, process: str | None = None) -> logging.Formatter:
    return _JsonFormatter(process) if format == "json" else _TextFormatter(process)


def set_up(options: LogOptions) -> None:
    """Of the API process."""
    handler = _handler(options, process=None)
    level = options.level.upper()
    for name, own_level in {
        "quire_engine": level,
        "uvicorn": "WARNING",
        "asyncio": "WARNING",
        "opentelemetry": "ERROR",
    }.items():
        logger = logging.getLogger(name)
        logger.setLevel(own_level)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(_is_told_otherwise)


def set_up_engine(options: LogOptions) -> None:
    """Of the engine process, whose libraries log too."""
    logging.basicConfig(level=options.level.upper(), handlers=[_handler(options, process="engine")])


def _handler(options: LogOptions, *, process: str | None) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(options.format, process=process))
    return handler
