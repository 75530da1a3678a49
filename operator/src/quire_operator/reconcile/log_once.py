"""Warnings of what is tried at intervals: each is logged once until another one follows or the cause is gone."""

import logging


class LogOnce:
    """A log of warnings without repetitions of the last one."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._last = logger, ""

    def warning(self, message: str) -> None:
        """Log the message, unless it is the last one."""
        if message != self._last:
            self._logger.warning("%s", message)
            self._last = message

    def reset(self) -> None:
        """Forget the last message, so that it is logged again."""
        self._last = ""
