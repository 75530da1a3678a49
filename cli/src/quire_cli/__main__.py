"""The start and the end of the ``quire`` command, so that Ctrl-C never ends in a traceback.

The first imports take a moment, or seconds on a busy machine, and so does the end of the interpreter. During both,
Ctrl-C ends the process at once, as it does for any program. In between the command handles it.
"""

import signal


def main() -> None:
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the caller has it ignored
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quire_cli.app import main as run

    if not ours:
        return run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
