"""The declarative flag reader: precedence, kinds, problems, variables, help and schema."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import FlagsError
from quire_common.flags.kinds import (
    Flag,
    Kind,
    choice,
    duration,
    integer,
    number,
    path,
    pattern,
    size,
    switch,
    text,
    url,
)
from quire_common.flags.table import FlagTable, FlagValues


def table(*flags: Flag, separator: str | None = None, reject_unknown_variables: bool = False) -> FlagTable:
    return FlagTable(
        program="prog",
        env_prefix="PROG_",
        groups={"Group": flags},
        intro="intro",
        outro="outro",
        separator=separator,
        reject_unknown_variables=reject_unknown_variables,
        hints={"old": "use --new"},
        removed={"past-size": "sizes are automatic"},
    )


def flag(name: str, kind: Kind, default: str | None = None, *, many: bool = False, required: bool = False) -> Flag:
    return Flag(name=name, kind=kind, help=f"the {name}", default=default, many=many, required=required)


TABLE = table(
    flag("port", integer(0, 65535), "80"), flag("verbose", switch(negatable=True)), flag("url", url("http://x"))
)


def read(argv: list[str], environ: dict[str, str] | None = None, of: FlagTable = TABLE) -> FlagValues:
    values = of.read(argv, environ or {})
    values.check()
    return values


def test_flags_precede_variables_and_variables_defaults() -> None:
    assert read([])["port"] == 80
    assert read([], {"PROG_PORT": "81"})["port"] == 81
    assert read(["--port", "82"], {"PROG_PORT": "81"})["port"] == 82
    assert (read([]).is_set("port"), read([], {"PROG_PORT": "81"}).is_set("port")) == (False, True)


def test_switches_turn_on_and_off() -> None:
    assert read([])["verbose"] is None
    assert read(["--verbose"])["verbose"] is True
    assert read(["--no-verbose"], {"PROG_VERBOSE": "yes"})["verbose"] is False


@pytest.mark.parametrize("link", ["tcp://10.0.0.1:80", "udp://10.0.0.1:80"])
def test_kubernetes_service_variables_are_ignored(link: str) -> None:
    links = {"PROG_PORT": link, "PROG_SERVICE_HOST": "10.0.0.1", "PROG_PORT_80_TCP_ADDR": "10.0.0.1"}
    strict = table(flag("port", integer(0, 65535), "80"), reject_unknown_variables=True)
    assert read([], links, strict)["port"] == 80


def test_variables_may_be_urls() -> None:
    assert read([], {"PROG_URL": "http://collector:4318"})["url"] == "http://collector:4318"


def test_removed_flags_and_variables_name_the_reason() -> None:
    reason = "was removed: sizes are automatic"
    assert TABLE.read(["--past_size=3"], {"PROG_PAST_SIZE": "3"}).problems == [
        f"the variable PROG_PAST_SIZE {reason}",
        f"--past-size {reason}",
    ]
    assert TABLE.schema()["x-removed"] == {"past-size": "sizes are automatic"}


def test_unknown_variables_are_problems_in_strict_tables() -> None:
    assert read([], {"PROG_PROT": "1"})["port"] == 80
    strict = table(flag("port", integer(0, 65535)), reject_unknown_variables=True)
    assert strict.read([], {"PROG_PROT": "1"}).problems == [
        "the variable PROG_PROT is unknown; did you mean PROG_PORT?"
    ]


@pytest.mark.parametrize(
    ("separator", "argv", "environ", "expected"),
    [
        (None, ["--name", "a", "b,c", "--name", "d"], {}, ("a", "b,c", "d")),
        (None, [], {"PROG_NAME": "a b,c"}, ("a", "b,c")),
        (",", ["--name", "a", "b,c"], {}, ("a", "b", "c")),
        (",", [], {"PROG_NAME": "a, b ,,c"}, ("a", "b", "c")),
    ],
)
def test_flags_take_several_values(separator: str | None, argv: list[str], environ: dict[str, str], expected) -> None:
    assert read(argv, environ, table(flag("name", text(), many=True), separator=separator))["name"] == expected


def test_every_problem_is_listed_at_once() -> None:
    many = table(flag("port", integer(0, 9)), flag("name", text(), many=True), flag("model", text(), required=True))
    values = many.read(["--port", "x", "--name", "--prot=1", "--old"], {"PROG_PORT": "y"})
    with pytest.raises(FlagsError) as caught:
        values.check()
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "PROG_PORT:",
        "--prot",
        "--old",
        "--port:",
        "--name:",
        "--model",
    ]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (integer(1), "7", 7),
        (number(0, 1), "0.5", 0.5),
        (choice(values={"16": 16, "32": 32}), "32", 32),
        (choice(values={"auto": None, "off": False}), "off", False),
        (size(), "1", 1),
        (size(), "512MiB", 2**29),
        (size(), "1.5GiB", 3 * 2**29),
        (size(), "2Gi", 2**31),
        (size(), "1 kb", 1000),
        (size(), "3TB", 3 * 10**12),
        (size(0), "0", 0),
        (duration(), "250ms", 0.25),
        (duration(), "1.5s", 1.5),
        (duration(), "2m", 120.0),
        (duration(), "0", 0.0),
        (duration(), "1h30m", 5400.0),
        (duration(), " 90 s", 90.0),
        (duration(), "120", 120.0),
        (pattern("[a-z]+", "letters", "X"), "abc", "abc"),
        (path(), "a/b", Path("a/b")),
        (url("http://x"), " https://a.example/b ", "https://a.example/b"),
    ],
)
def test_flag_types_parse_valid_text(kind: Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (integer(1), "0"),
        (integer(1, 5), "6"),
        (integer(1), "1.5"),
        (number(0, 1, above_minimum=True), "0"),
        (number(0, 1), "nan"),
        (choice("a", "b"), "c"),
        (switch(), "maybe"),
        (size(), "0"),
        (size(), "4 apples"),
        (size(1024, 2048), "1KB"),
        (size(1, 2048), "4KiB"),
        (duration(above_minimum=True), "0"),
        (duration(10.0), "9s"),
        (duration(maximum=60.0), "61"),
        (duration(), "soon"),
        (duration(), "-1"),
        (pattern("[a-z]+", "letters", "X"), "ab1"),
        (path(), " "),
        (path(readable=True), "/no/such/file"),
        (text(), " "),
        (url("http://x"), "collector:4317"),
    ],
)
def test_flag_types_reject_invalid_text(kind: Kind, text: str) -> None:
    with pytest.raises(ValueError):
        kind.parse(text)
    assert kind.expected


@given(st.lists(st.text(max_size=12), max_size=4), st.dictionaries(st.just("PROG_PORT"), st.text(max_size=5)))
def test_any_command_line_gives_values_or_problems(argv: list[str], environ: dict[str, str]) -> None:
    values = TABLE.read(argv, environ)
    assert values.problems or isinstance(values["port"], int)


def test_help_and_schema_describe_every_flag() -> None:
    text = TABLE.help_text(100)
    assert text.startswith("intro") and text.endswith("outro")
    assert all(f"--{name}" in text for name in TABLE.flags)
    schema = TABLE.schema()
    json.dumps(schema)
    assert schema["properties"]["port"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 65535,
        "default": 80,
        "description": "the port",
        "x-env": "PROG_PORT",
    }
