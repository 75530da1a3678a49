"""Logging of the API process: one line an event on standard error, as text or as JSON, with the request's id."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from quire_engine.config import LogOptions

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        line = f"{time} {record.levelname.lower():7} {record.getMessage()}"
        if (current := request_id.get()) is not None:
            line += f" [{current}]"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _is_told_otherwise(record: logging.LogRecord) -> bool:
    # A stream that failed ends without its last chunk on purpose (``streaming``); uvicorn thinks it an error.
    return not str(record.msg).startswith("ASGI callable returned without completing response")


def formatter(format: Literal["text", "json"]) -> logging.Formatter:
    return _JsonFormatter() if format == "json" else _TextFormatter()


def set_up(options: LogOptions) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(options.format))
    level = options.level.upper()
    for name, own_level in {"quire_engine": level, "uvicorn": "WARNING", "asyncio": "WARNING"}.items():
        logger = logging.getLogger(name)
        logger.setLevel(own_level)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(_is_told_otherwise)
