"""Ranges of JSON numbers as terminals of Lark's notation, by exact decimal arithmetic.

A range with bounds has no exponents: ``12``, ``12.0`` and ``12.00`` are in ``[12, 12]``, ``1.2e1`` is not. Integers are
written without a fraction.
"""

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Self

from quire_engine.grammar.spec import GrammarError

MAX_DIGITS = 400
"""The most digits before and after the point of a number in a schema; the limits of doubles have 309 and 341."""
MAX_LISTED = 512
"""The most multiples that a terminal lists one by one."""

_INTEGER = r"-?(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+)?"
_NUMBER = rf"{_INTEGER}{_FRACTION}([eE][+-]?[0-9]+)?"
_MAX_SUFFIX = 3
"""The most last digits by which divisibility is decided: they decide it for divisors of 1,000."""
_MAX_DIVISOR = 50_000
"""The largest divisor that is left to llguidance, whose states are as many."""
_SAFE = 2**53
"""The bound up to which llguidance computes with whole numbers exactly."""


def exact(value: Any, keyword: str) -> Decimal:
    """Return a number of a schema. Raises GrammarError for another value, and for a number with too many digits."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise GrammarError(f"{keyword}: should be a number")
    number = Decimal(value) if isinstance(value, int) else Decimal(str(value))
    if not number.is_finite():
        raise GrammarError(f"{keyword}: should be a finite number")
    parts = number.as_tuple()
    assert isinstance(parts.exponent, int)
    if not number:
        return Decimal(0)
    if number.adjusted() >= MAX_DIGITS or -parts.exponent > MAX_DIGITS:
        raise GrammarError(f"{keyword}: has more than {MAX_DIGITS} digits before or after the point")
    return number


def is_whole(number: Decimal) -> bool:
    """Return whether a number is an integer; 1.0 is one."""
    return number == number.to_integral_value()


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers between two bounds, each of which may be absent or exclusive, that are multiples of another one."""

    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False
    multiple: Fraction | None = None
    """Every number is a multiple of this; 1 stands for integers."""

    def __and__(self, other: Self) -> Self:
        """Return the numbers of both ranges."""
        both = self
        if other.low is not None and (self.low is None or (other.low, other.low_open) > (self.low, self.low_open)):
            both = replace(both, low=other.low, low_open=other.low_open)
        if other.high is not None and (
            self.high is None or (other.high, self.high_open) < (self.high, other.high_open)
        ):
            both = replace(both, high=other.high, high_open=other.high_open)
        if other.multiple is not None:
            both = replace(both, multiple=_lcm(self.multiple, other.multiple))
        return both

    def tight(self) -> Self:
        """Return the same numbers with bounds that are multiples, where numbers are multiples of another one."""
        step = self.multiple
        if step is None:
            return self
        low, high = self.low, self.high
        if low is not None:
            count = math.floor(Fraction(low) / step) + 1 if self.low_open else math.ceil(Fraction(low) / step)
            low = _decimal(count * step)
        if high is not None:
            count = math.ceil(Fraction(high) / step) - 1 if self.high_open else math.floor(Fraction(high) / step)
            high = _decimal(count * step)
        return replace(self, low=low, low_open=False, high=high, high_open=False)

    def is_empty(self) -> bool:
        """Return whether no number is in the range."""
        tight = self.tight()
        if tight.low is None or tight.high is None:
            return False
        return tight.low > tight.high or (tight.low == tight.high and (tight.low_open or tight.high_open))

    def terminal(self) -> str | dict[str, Any]:
        """Return the body of a terminal in Lark's notation, or a JSON schema that llguidance enforces exactly.

        The range must not be empty. Raises GrammarError for multiples that cannot be enforced.
        """
        tight = self.tight()
        if tight.multiple is None:
            return _joined(tight._bounds(_FRACTION) or [_NUMBER])
        if tight.low is not None and tight.high is not None:
            count = math.floor((Fraction(tight.high) - Fraction(tight.low)) / tight.multiple) + 1
            if count == 1 or (tight.multiple != 1 and count <= MAX_LISTED):
                return tight._listed(count)
        if tight.multiple == 1:
            return _joined(tight._bounds("") or [_INTEGER])
        shape = _multiples(tight.multiple)
        if shape is None:
            return tight._schema()
        fraction = "" if tight.multiple.denominator == 1 else _FRACTION
        return _joined([shape, *tight._bounds(fraction)])

    def _bounds(self, fraction: str) -> list[str]:
        """Return regular expressions which a number must match all."""
        expressions = []
        if self.low is not None:
            if self.low >= 0:
                expressions.append(_at_least(self.low, self.low_open, fraction))
            else:
                below = _at_most(self.low.copy_abs(), self.low_open, fraction)
                expressions.append(rf"(0|[1-9][0-9]*){fraction}|-({below})")
        if self.high is not None:
            below_zero = self.high < 0 or (self.high == 0 and self.high_open)
            if below_zero:
                expressions.append(f"-({_at_least(self.high.copy_abs(), self.high_open, fraction)})")
            else:
                above = _at_most(self.high, self.high_open, fraction)
                expressions.append(rf"{above}|-(0|[1-9][0-9]*){fraction}")
        return expressions

    def _listed(self, count: int) -> str:
        assert self.low is not None and self.multiple is not None
        values = [_decimal(Fraction(self.low) + number * self.multiple) for number in range(count)]
        zeros = self.multiple.denominator != 1
        return _joined(["|".join(_spelled(value, zeros=zeros) for value in values)])

    def _schema(self) -> dict[str, Any]:
        """Return a schema for llguidance, whose multiples and bounds are exact within these limits."""
        assert self.multiple is not None
        bounds = {"minimum": self.low, "maximum": self.high}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        step, coefficient = float(self.multiple), _decimal(self.multiple).as_tuple()
        number = int("".join(map(str, coefficient.digits)))
        is_small = number <= _MAX_DIVISOR and Fraction(Decimal(repr(step))) == self.multiple
        if not is_small or any(abs(bound) > _SAFE or Decimal(repr(float(bound))) != bound for bound in given.values()):
            raise GrammarError(
                f"multipleOf: multiples of {_decimal(self.multiple)} within these bounds are not supported"
            )
        whole = self.multiple.denominator == 1
        values = {name: int(bound) if whole else float(bound) for name, bound in given.items()}
        return {"type": "integer" if whole else "number", "multipleOf": int(step) if whole else step, **values}


def _joined(expressions: list[str]) -> str:
    return " & ".join(f"/{each}/" for each in expressions)


def _lcm(one: Fraction | None, other: Fraction) -> Fraction:
    if one is None:
        return other
    numerators = one.numerator * other.denominator, other.numerator * one.denominator
    return Fraction(math.lcm(*numerators), one.denominator * other.denominator)


def _decimal(value: Fraction) -> Decimal:
    """Return a fraction whose denominator divides a power of ten."""
    places = 0
    while value.denominator != 1:
        value, places = value * 10, places + 1
    return Decimal((int(value < 0), tuple(map(int, str(abs(value.numerator)))), -places))


def _digits(number: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point, without zeros at the ends."""
    whole, _, fraction = format(number, "f").partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _spelled(number: Decimal, *, zeros: bool) -> str:
    """Return a regular expression of one number; ``zeros`` allows them at the end of its fraction."""
    whole, fraction = _digits(number.copy_abs())
    ending = rf"\.{fraction}{'0*' if zeros else ''}" if fraction else r"(\.0+)?" if zeros else ""
    return f"{'-' if number < 0 else ''}{whole}{ending}"


def _class(first: int, last: int) -> str:
    return f"[{first}-{last}]" if first < last else str(first)


def _at_least(bound: Decimal, is_open: bool, fraction: str) -> str:
    """Return a regular expression of decimals without a sign from a bound on."""
    whole, rest = _digits(bound)
    choices = [rf"[1-9][0-9]{{{len(whole)},}}{fraction}"]
    for place, digit in enumerate(whole):
        if digit != "9":
            larger = _class(int(digit) + 1, 9)
            choices.append(f"{whole[:place]}{larger}[0-9]{{{len(whole) - place - 1}}}{fraction}")
    if not fraction:
        return "|".join([*choices, whole])
    if not rest:
        choices.append(rf"{whole}\.[0-9]*[1-9][0-9]*" if is_open else whole + fraction)
        return "|".join(choices)
    for place, digit in enumerate(rest):
        if digit != "9":
            choices.append(rf"{whole}\.{rest[:place]}{_class(int(digit) + 1, 9)}[0-9]*")
    choices.append(rf"{whole}\.{rest}[0-9]*" + ("[1-9][0-9]*" if is_open else ""))
    return "|".join(choices)


def _at_most(bound: Decimal, is_open: bool, fraction: str) -> str:
    """Return a regular expression of decimals without a sign up to a bound, which is above 0 or not exclusive."""
    whole, rest = _digits(bound)
    choices = []
    if len(whole) > 1:
        choices += [f"0{fraction}", rf"[1-9][0-9]{{0,{len(whole) - 2}}}{fraction}"]
    for place, digit in enumerate(whole):
        least = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            smaller = _class(least, int(digit) - 1)
            choices.append(f"{whole[:place]}{smaller}[0-9]{{{len(whole) - place - 1}}}{fraction}")
    if not fraction:
        return "|".join([*choices, whole])
    if not rest:
        if not is_open:
            choices.append(rf"{whole}(\.0+)?")
        return "|".join(choices)
    choices.append(whole)
    for place, digit in enumerate(rest):
        if digit != "0":
            choices.append(rf"{whole}\.{rest[:place]}{_class(0, int(digit) - 1)}[0-9]*")
        if place:
            choices.append(rf"{whole}\.{rest[:place]}")
    if not is_open:
        choices.append(rf"{whole}\.{rest}0*")
    return "|".join(choices)


def _multiples(step: Fraction) -> str | None:
    """Return a regular expression of the multiples of a step; None where their last digits do not decide."""
    places, whole = 0, step
    while whole.denominator != 1:
        whole, places = whole * 10, places + 1
    divisor, zeros = whole.numerator, 0
    if places and divisor == 1:
        return rf"{_INTEGER}(\.[0-9]{{1,{places}}}0*)?"
    if places:
        if places > _MAX_SUFFIX or 10**places % divisor:
            return None
        fractions = [str(number).zfill(places).rstrip("0") for number in range(divisor, 10**places, divisor)]
        return rf"{_INTEGER}(\.(0+|({'|'.join(fractions)})0*))?"
    while divisor % 10 == 0:
        divisor, zeros = divisor // 10, zeros + 1
    for length in range(_MAX_SUFFIX + 1):
        if 10**length % divisor == 0:
            suffixes = [str(number).zfill(length) for number in range(0, 10**length, divisor)] if length else [""]
            small = [str(number) for number in range(divisor, 10**length, divisor)]
            large = f"[1-9][0-9]*({'|'.join(suffixes)})"
            return f"-?(0|({'|'.join([*small, large])})0{{{zeros}}})"
    return None
