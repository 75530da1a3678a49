"""Programs of the system, run one at a time: `ip`, `mount`, `openssl`, `apt-get`."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from quire_cluster.errors import ComponentFailed

SECONDS: Final = 60


def run(command: Sequence[str], *, cwd: str | None = None, seconds: float = SECONDS) -> str:
    """Return the output. Raise ComponentFailed with the command and its error output."""
    try:
        done = subprocess.run(command, cwd=cwd, input="", capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as expired:
        raise ComponentFailed(f"`{' '.join(command)}` had not ended after {seconds:.0f} s") from expired
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise ComponentFailed(f"`{' '.join(command)}` ended with status {done.returncode}: {said}")
    return done.stdout


def follow(
    command: Sequence[str], *, environment: Mapping[str, str], see: Callable[[str], None], cwd: Path | None = None
) -> int:
    """Call `see` with each line that a long command prints, and return its status."""
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as running:
        try:
            for line in running.stdout or ():
                see(line.rstrip())
        except BaseException:  # Ctrl-C as well: what it started must not run on unseen
            running.terminate()
            raise
    return running.returncode


def succeeds(command: Sequence[str]) -> bool:
    """Return True if the command ends in time with status 0."""
    try:
        run(command)
    except ComponentFailed:
        return False
    return True
