"""A CPU that rejects instructions: Python imports this at its start by PYTHONPATH.

``SHIM_REFUSES`` names programs, each with a variable: a program is killed by SIGILL unless its variable is set.
``SHIM_ENDS`` replaces the death by other code.
"""

import os
import sys

for each in os.environ.get("SHIM_REFUSES", "").split():
    program, _, variable = each.partition("=")
    if program in sys.orig_argv and not os.environ.get(variable):
        exec(os.environ.get("SHIM_ENDS", "import signal; os.kill(os.getpid(), signal.SIGILL)"))
