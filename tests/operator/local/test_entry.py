"""Ctrl-C before the command has begun, and after it has ended: it ends at once, and says nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAITS = "import time; print('now', flush=True); time.sleep(600)"
WHILE_IMPORTING = "import quire_operator.entry; quire_operator.entry.main()"
AT_THE_END = f"import atexit; atexit.register(lambda: exec({WAITS!r})); {WHILE_IMPORTING}"


@pytest.mark.parametrize(
    ("program", "shadowed"), [(WHILE_IMPORTING, "rich"), (AT_THE_END, None)], ids=["while importing", "at the end"]
)
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_ctrl_c_ends_it_without_a_word(tmp_path: Path, program: str, shadowed: str | None, ignored: bool) -> None:
    if shadowed:
        (tmp_path / f"{shadowed}.py").write_text(WAITS)
    start = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " if ignored else ""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", start + program, "--version"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline().strip() != "now":
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            if ignored:
                process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (-(signal.SIGTERM if ignored else signal.SIGINT), "")
