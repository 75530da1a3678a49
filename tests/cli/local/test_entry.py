"""The command as a process: Ctrl-C before its start and after its end, and a closed output."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "demo.yaml"
WAITS = "import time; print('now', flush=True); time.sleep(600)"
WHILE_IMPORTING = "import quire_cli.__main__; quire_cli.__main__.main()"
AT_THE_END = f"import atexit; atexit.register(lambda: exec({WAITS!r})); {WHILE_IMPORTING}"


@pytest.mark.parametrize(
    ("program", "shadowed"), [(WHILE_IMPORTING, "rich"), (AT_THE_END, None)], ids=["while importing", "at the end"]
)
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_ctrl_c_exits_without_output(tmp_path: Path, program: str, shadowed: str | None, ignored: bool) -> None:
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_unwritable_output_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", WHILE_IMPORTING, "plan", "-f", str(DEMO), "--gpu", "H100 80GB"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "quire: the output cannot be written: No space left on device\n")
