"""Bounds and multiples of numbers are exact, whatever their digits; fractions are the reference."""

import json
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.grammar.spec import GrammarError

Compile = Callable[..., str]
Accepts = Callable[[str, str], bool]

LARGE = (2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 1234567890123456789, 123456789012345678901234567890)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBERS = st.one_of(
    st.integers(-30, 30).map(Decimal),
    st.builds(lambda digits, places: Decimal(digits).scaleb(-places), st.integers(-4000, 4000), st.integers(0, 4)),
    st.builds(
        lambda large, sign, offset: Decimal(large * sign + offset), st.sampled_from(LARGE), *[st.integers(-1, 1)] * 2
    ),
)
STEPS = st.sampled_from(
    [Decimal(step) for step in ("1", "2", "3", "7", "10", "25", "1000", "0.1", "0.01", "0.25", "0.5")]
)
OFFSETS = ("0", "1", "-1", "0.1", "-0.1", "0.01", "-0.001", "0.05", "-0.5")


def allowed(schema: dict[str, Any], number: Decimal) -> bool:
    value = Fraction(number)
    bounds = {name: Fraction(schema[name]) for name in BOUNDS if name in schema}
    return (
        (schema["type"] == "number" or value.denominator == 1)
        and ("multipleOf" not in schema or (value / Fraction(schema["multipleOf"])).denominator == 1)
        and value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and not ("exclusiveMinimum" in bounds and value <= bounds["exclusiveMinimum"])
        and not ("exclusiveMaximum" in bounds and value >= bounds["exclusiveMaximum"])
    )


def written(schema: dict[str, Any]) -> str:
    """Return a schema as JSON with the digits of its numbers."""
    fields = [
        f'"{name}":{value:f}' if isinstance(value, Decimal) else f'"{name}":{json.dumps(value)}'
        for name, value in schema.items()
    ]
    return "{" + ",".join(fields) + "}"


@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={**dict.fromkeys(BOUNDS, NUMBERS), "multipleOf": STEPS},
    )
)
def test_bounds_and_multiples_are_exact(grammar: Compile, accepts: Accepts, schema: dict[str, Any]) -> None:
    with localcontext() as context:
        context.prec = 100
        near = {
            value + Decimal(offset) for value in schema.values() if isinstance(value, Decimal) for offset in OFFSETS
        }
        near |= {Decimal(offset) for offset in OFFSETS} | {Decimal(large) for large in LARGE}
        near |= {schema["multipleOf"] * count for count in (-100, -3, 2, 17)} if "multipleOf" in schema else set()
    valid = {number for number in near if allowed(schema, number)}
    try:
        compiled = grammar("json_schema", written(schema))
    except GrammarError as error:
        assert not valid or str(error).startswith("multipleOf: ")
        return
    spelled = {
        number: str(int(number)) if number == number.to_integral_value() else f"{number.normalize():f}"
        for number in near
    }
    assert {number for number, text in spelled.items() if accepts(compiled, text)} == valid


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ('{"enum":[1234567890123456789]}', ["1234567890123456789"], ["1234567890123456768"]),
        (
            '{"const":123456789012345678901234567890}',
            ["123456789012345678901234567890"],
            ["123456789012345677877719597056"],
        ),
        ('{"const":[{"a":9007199254740993}]}', ['[{"a":9007199254740993}]'], ['[{"a":9007199254740992}]']),
        ('{"const":0.12345678901234567890123}', ["0.12345678901234567890123"], ["0.12345678901234568"]),
        ('{"type":"integer","maximum":9007199254740993}', ["9007199254740993"], ["9007199254740994"]),
        (
            '{"type":"integer","minimum":0,"maximum":18446744073709551615}',
            ["18446744073709551615"],
            ["18446744073709551616"],
        ),
        ('{"type":"integer","minimum":-9223372036854775808}', ["-9223372036854775808", "0"], ["-9223372036854775809"]),
        (
            '{"type":"number","minimum":-1.7976931348623157e308,"maximum":1.7976931348623157e308}',
            ["0.5", "1" + "0" * 308, "-17976931348623157" + "0" * 292],
            ["2" + "0" * 308, "17976931348623158" + "0" * 292],
        ),
        ('{"type":"number","exclusiveMinimum":0,"maximum":0.5}', ["0.5", "0.50", "0.0001"], ["0", "0.0", "0.51"]),
        ('{"type":"number","minimum":-1.5,"exclusiveMaximum":-1}', ["-1.5", "-1.01"], ["-1", "-1.0", "-1.51"]),
        ('{"type":"number","minimum":0.1,"maximum":0.25}', ["0.2", "0.20", "0.1", "0.25"], ["0.09", "0.3"]),
        ('{"type":"number","maximum":3.11}', ["3.1", "3", "3.110"], ["3.2", "3.111"]),
        ('{"type":"number","minimum":5,"exclusiveMinimum":true}', ["5.1"], ["5", "5.0"]),
        ('{"type":"integer","multipleOf":0.5}', ["3"], ["0.5"]),
    ],
)
def test_numbers_keep_the_digits_of_the_schema(
    grammar: Compile, accepts: Accepts, schema: str, valid: list[str], invalid: list[str]
) -> None:
    compiled = grammar("json_schema", schema)
    assert [text for text in valid if not accepts(compiled, text)] == []
    assert [text for text in invalid if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    "schema", ['{"maximum":1e401}', '{"const":1e-999999999}', '{"multipleOf":0}', '{"minimum":"1"}']
)
def test_numbers_that_cannot_be_enforced_are_refused_by_name(grammar: Compile, schema: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar("json_schema", schema)
    assert str(caught.value).startswith(f"{next(iter(json.loads(schema)))}: ")
