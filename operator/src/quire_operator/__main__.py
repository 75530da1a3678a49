"""The ``quire-operator`` command: read the command line and run the operator until it is stopped."""

import asyncio
import gc
import logging
import os
import shutil
import sys

from quire_common.errors import ConfigurationError
from quire_common.logs import set_up_logging
from quire_operator import __version__
from quire_operator.app.settings import FLAGS, parse_settings
from quire_operator.errors import UserError


def main() -> None:
    """Run the command and exit."""
    if "--help" in sys.argv or "-h" in sys.argv:
        print(FLAGS.help_text(shutil.get_terminal_size((120, 24)).columns), end="")
        return
    if "--version" in sys.argv:
        print(f"quire-operator {__version__}")
        return
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        set_up_logging(settings.log_level)
        logging.getLogger("kopf").setLevel(logging.WARNING)  # kopf's own lines are about its internals
        logging.getLogger("httpx").setLevel(logging.WARNING)
        from quire_operator.app.run import run  # takes seconds to import, which --help and a wrong flag do not need

        # Imported modules stay, and so does most of what watches deliver. A parsed object alone has hundreds of
        # containers, each counted by the collector, so that the default thresholds cause many useless collections.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        asyncio.run(run(settings))
    except ConfigurationError as error:
        problems = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"quire-operator cannot start:\n{problems}\nquire-operator --help lists the flags.", file=sys.stderr)
        sys.exit(error.exit_code)
    except UserError as error:
        lines = [f"quire-operator: {error.message}", *(f"  - {detail}" for detail in error.details)]
        if error.hint is not None:
            lines.append(error.hint)
        print("\n".join(lines), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
