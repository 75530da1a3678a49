"""``quire-operator``: reads the command line and runs the operator until it is told to stop."""

import asyncio
import json
import logging
import os
import sys
import time

from quire_operator.app.settings import parse_settings
from quire_operator.errors import SettingsProblem, UserError


def main() -> None:
    """The entry point; exits."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        set_up_logging(settings.log_level)
        from quire_operator.app.run import run  # seconds of imports that --help and a wrong flag need not wait for

        asyncio.run(run(settings))
    except UserError as error:
        sys.exit(_print(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _print(error: UserError) -> int:
    lines = [f"quire-operator: {error.message}", *(f"  - {detail}" for detail in error.details)]
    if error.hint is not None:
        lines.append(error.hint)
    print("\n".join(lines), file=sys.stderr)
    return 2 if isinstance(error, SettingsProblem) else error.exit_code


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str) -> None:
    """To stderr: lines for people at a terminal, JSON lines for machines elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"))
    else:
        handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)  # its own lines are about its inner life
    logging.getLogger("httpx").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
