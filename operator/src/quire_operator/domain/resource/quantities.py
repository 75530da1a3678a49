"""Kubernetes durations ("300s", "1h30m") and quantities ("4Gi", "500m") as numbers, and bytes as people read them.

Used wherever a person writes an amount. ``None`` means that the text is not one; the caller says where it stood.
"""

import math
import re
from fractions import Fraction

# Written amounts are short; the bound keeps a hostile "1e999999999" from becoming a number of that many digits.
_MAX_DIGITS = 18
_UNIT_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|h|m|s)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_QUANTITY = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]{1,2})?"
)
_SUFFIX: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}


def parse_duration_seconds(text: str) -> float | None:
    """Seconds of a duration such as ``300s``, ``500ms``, ``1h30m`` or ``0``."""
    if text == "0":
        return 0.0
    if _DURATION.fullmatch(text) is None:
        return None
    return sum(float(amount) * _UNIT_SECONDS[unit] for amount, unit in _DURATION_PART.findall(text))


def format_duration(seconds: float) -> str:
    """The shortest duration string that says the same: ``90.0`` is ``1m30s``."""
    milliseconds = round(seconds * 1000)
    parts: list[str] = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_quantity(text: str | int) -> Fraction | None:
    """The number a Kubernetes quantity stands for, exactly."""
    if isinstance(text, int):
        return Fraction(text) if 0 <= text < 10**_MAX_DIGITS else None
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, suffix = match.group(1), match.group(2) or ""
    if len(suffix) > 1 and suffix[0] in "eE":
        return Fraction(number) * Fraction(10) ** int(suffix[1:])
    return Fraction(number) * _SUFFIX[suffix]


def parse_bytes(text: str | int) -> int | None:
    """Whole bytes of a quantity, rounded up as Kubernetes does."""
    quantity = parse_quantity(text)
    return None if quantity is None else math.ceil(quantity)


def format_bytes(count: int) -> str:
    """Bytes for people: three figures and a binary unit."""
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        if amount < 1024 or unit == "PiB":
            break
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"
