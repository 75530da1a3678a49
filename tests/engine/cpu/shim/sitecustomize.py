"""A CPU that rejects instructions, for ``test_refused_instructions``: Python imports this at its start by PYTHONPATH.

``SHIM_REFUSES`` names a program and a variable: the program is killed by SIGILL unless the variable is set.
"""

import os
import signal
import sys

program, _, variable = os.environ.get("SHIM_REFUSES", "").partition(" ")
if program in sys.orig_argv and not os.environ.get(variable):
    os.kill(os.getpid(), signal.SIGILL)
