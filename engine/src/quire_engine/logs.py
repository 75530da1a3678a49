"""Logging of both processes. The engine process marks its lines, so that the two are distinct in one stream."""

import logging

from quire_common.logs import log_handler, set_up_logging
from quire_engine.config import LogOptions


def set_up(options: LogOptions) -> None:
    """Set up the logging of the API process."""
    handler = log_handler(options.format)
    level = options.level.upper()
    for name, own_level in {
        "quire_engine": level,
        "quire_common": level,
        "uvicorn": "WARNING",
        "asyncio": "WARNING",
        "opentelemetry": "ERROR",
    }.items():
        logger = logging.getLogger(name)
        logger.setLevel(own_level)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(_is_not_expected)


def set_up_engine(options: LogOptions) -> None:
    """Set up the logging of the engine process, whose libraries log too."""
    set_up_logging(options.level, options.format, process="engine")


def _is_not_expected(record: logging.LogRecord) -> bool:
    # A failed stream ends without its last chunk on purpose (``streaming``); uvicorn reports that as an error.
    return not str(record.msg).startswith("ASGI callable returned without completing response")
