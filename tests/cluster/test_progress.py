"""The progress of a long build, on a terminal and in a log."""

import io

import pytest
from set_clock import SetClock

from quire_cluster.progress import LOG_INTERVAL_SECONDS, Progress, minutes_and_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_printed_periodically() -> None:
    log, clock = io.StringIO(), SetClock()
    progress = Progress(log, clock)
    for second in range(int(2 * LOG_INTERVAL_SECONDS) + 1):
        clock.now = float(second)
        progress.update(f"at {second}")
    assert log.getvalue() == f"at {LOG_INTERVAL_SECONDS:.0f}\nat {2 * LOG_INTERVAL_SECONDS:.0f}\n"


def test_a_terminal_has_one_line_rewritten_and_final_lines_stay() -> None:
    terminal, clock = Terminal(), SetClock()
    progress = Progress(terminal, clock)
    for text in ("one", "two"):
        clock.now += 1
        progress.update(text)
    progress.say("done")
    progress.say("next")
    assert terminal.getvalue() == "one\r\x1b[Ktwo\r\x1b[Kdone\nnext\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 00 s"), (384, "6 min 24 s")])
def test_durations_are_formatted_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert minutes_and_seconds(seconds) == text
