"""The ``quire`` command's first and last step, so that a person's Ctrl-C never ends in a traceback.

What the command needs takes a second to import, several on a busy machine, and the interpreter takes a moment to end:
there a Ctrl-C ends it at once, as it ends any program. In between the command decides.
"""

import signal


def main() -> None:
    """Entry point."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started us has it ignored
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
