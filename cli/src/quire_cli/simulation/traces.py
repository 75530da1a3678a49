"""Production traces: the Azure LLM inference trace (CSV) and the Mooncake traces (JSON lines).

Only ``read_trace`` touches a file; the rest is pure.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS = 512
_MOONCAKE_LINE = (
    'JSON such as {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}, '
    "its time a number of milliseconds"
)
_MOST_SHOWN = 80
_MOST_TOKENS = 10**9


class TraceError(ValueError):
    """The file is not a trace that can be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    time: float
    """Its arrival, in seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """The names of the prompt's blocks of ``Replay.prefix_block_tokens``. A name stands for its block and all blocks
    before it; equal ones can be found in a prefix cache. Empty if the trace does not know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The adaptation of a trace to the machine: a time window, a speed, scaled lengths."""

    speed: float = 1.0
    start_seconds: float = 0.0
    duration_seconds: float | None = None
    scale_input: float = 1.0
    scale_output: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    @property
    def prefix_block_tokens(self) -> int:
        """The length of a shared block, of originally 512 tokens."""
        return max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale_input))


def read_trace(path: Path) -> list[Request]:
    """Return the requests in order of arrival, the first at 0 s. Raise TraceError or OSError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            requests = list(_mooncake(file) if first.lstrip().startswith("{") else _azure(file))
    except UnicodeDecodeError as error:
        raise TraceError(f"it is not text: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise TraceError(f"it is neither a trace in CSV nor in JSON lines: {error}") from None
    if not requests:
        raise TraceError("it contains no requests")
    requests.sort(key=lambda request: request.time)
    zero = requests[0].time
    return [replace(request, time=request.time - zero) for request in requests]


def _azure(lines: Iterable[str]) -> Iterator[Request]:
    reader = csv.DictReader(lines)
    missing = [column for column in AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(
            f"a trace in CSV needs a header with {', '.join(AZURE_COLUMNS)}; missing: {', '.join(missing)}"
        )
    for record in reader:
        try:
            moment = datetime.fromisoformat(record["TIMESTAMP"].strip())
            # Some traces have an offset in some of their times. Without one it is UTC, which has no summer time.
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            yield Request(moment.timestamp(), _tokens(record["ContextTokens"]), _tokens(record["GeneratedTokens"]))
        except (TypeError, ValueError, AttributeError):
            raise TraceError(f"line {reader.line_num} of the trace: {_azure_complaint(record)}") from None


def _mooncake(lines: Iterable[str]) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield Request(
                _finite(record["timestamp"]) / 1000.0,
                _tokens(record["input_length"]),
                _tokens(record["output_length"]),
                tuple(int(block) for block in record.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError):
            raise TraceError(f"line {number} of the trace: {_shown(line)} is not {_MOONCAKE_LINE}") from None


def _azure_complaint(record: Mapping[str | None, str | None]) -> str:
    values = (f"{column} {_shown(record.get(column) or '')}" for column in AZURE_COLUMNS)
    return f"{', '.join(values)}; a time such as 2023-11-16 18:17:03.97 and two whole numbers of at least 0 are needed"


def _shown(text: str) -> str:
    """Not all of a line that may be long."""
    text = text.strip()
    return json.dumps(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…", ensure_ascii=False)


def _tokens(value: str | float) -> int:
    number = int(value)
    if not 0 <= number <= _MOST_TOKENS:
        raise ValueError("a number of tokens is negative, or larger than any context")
    return number


def _finite(value: float) -> float:
    if not isfinite(value):
        raise ValueError(f"{value} is not a time")
    return value


def shaped(requests: Sequence[Request], replay: Replay) -> list[Request]:
    """Return the part of the trace that ``replay`` selects, with its speed and lengths."""
    end = float("inf") if replay.duration_seconds is None else replay.start_seconds + replay.duration_seconds
    return [
        Request(
            (request.time - replay.start_seconds) / replay.speed,
            _bounded(request.prompt_tokens * replay.scale_input, replay.max_input_tokens),
            _bounded(request.output_tokens * replay.scale_output, replay.max_output_tokens),
            request.prefix_blocks,
        )
        for request in requests
        if replay.start_seconds <= request.time < end
    ]


def _bounded(length: float, limit: int | None) -> int:
    return max(1, round(length) if limit is None else min(limit, round(length)))
