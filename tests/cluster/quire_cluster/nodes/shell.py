"""System programs that change the machine, run one at a time: `ip`, `mount`, `nsenter`."""

import subprocess
from collections.abc import Sequence
from typing import Final

from quire_cluster.errors import ComponentFailed

SECONDS: Final = 60


def run(command: Sequence[str], *, stdin: str = "", seconds: float = SECONDS) -> str:
    """Return the output. Raise ComponentFailed with the command and its error output."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as expired:
        raise ComponentFailed(f"`{' '.join(command)}` had not ended after {seconds:.0f} s") from expired
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise ComponentFailed(f"`{' '.join(command)}` ended with status {done.returncode}: {said}")
    return done.stdout


def succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode == 0
