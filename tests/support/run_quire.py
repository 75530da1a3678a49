"""The ``quire`` command, run in the process of the test."""

import pytest

from quire_cli import app


def run_quire(capfd: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Run the command and return its exit code, output and errors."""
    code = 0
    try:
        app.main([str(each) for each in args])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capfd.readouterr()
    return code, captured.out, captured.err
