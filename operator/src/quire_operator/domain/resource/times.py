"""Times as text in RFC 3339, which all parts of the domain read and write. Pure."""

from datetime import UTC, datetime


def clock_time(seconds: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_time(seconds: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: object) -> float | None:
    """Return Unix seconds, or None if the text is not a time."""
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if time is None or time.tzinfo is None else time.timestamp()
