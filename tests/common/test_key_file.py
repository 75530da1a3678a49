"""API keys from a file: parsing, reloading, comparison."""

import hashlib
from pathlib import Path

import pytest
from set_clock import SetClock

from quire_common.errors import KeyFileError
from quire_common.key_file import KeyFile, KeyLimits, bearer_token, parse_keys

KEY, OTHER = "sk-0123456789", "sk-9876543210"


def test_keys_are_reloaded_when_the_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet changes a mounted Secret at once, by another link."""
    folders = [tmp_path / "..1", tmp_path / "..2", tmp_path / "..3"]
    for folder, text in zip(folders, (KEY, "", f"{KEY}\n{OTHER}\n"), strict=True):
        folder.mkdir()
        (folder / "keys").write_text(text)
    data = tmp_path / "..data"
    (tmp_path / "keys").symlink_to(data / "keys")

    def point_to(folder: Path) -> None:
        (tmp_path / "new").symlink_to(folder)
        (tmp_path / "new").rename(data)

    point_to(folders[0])
    clock = SetClock()
    keys = KeyFile(tmp_path / "keys", clock)
    assert keys.find(KEY)
    point_to(folders[1])
    clock.now += 1.0
    assert keys.find(KEY)
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "contains no key" in caplog.text
    assert keys.find(OTHER) is None
    point_to(folders[2])
    assert keys.find(OTHER) is None
    clock.now += 1.0
    assert keys.find(OTHER)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["contains no key"]),
        ("# nothing yet\n\n", ["contains no key"]),
        (f"{KEY}\nshort\nname=a requests_per_minute=0 {KEY}\nname=a\n", ["line 2", "line 3", "line 4"]),
        ("sha256:12\n", ["line 1"]),
        (f"{KEY}\ntenant={KEY}\n", ["line 2"]),
        ("two words12345\n", ["line 1"]),
    ],
)
def test_problems_name_lines_without_quoting_keys(text: str, parts: list[str]) -> None:
    with pytest.raises(KeyFileError) as caught:
        parse_keys(text, "keys")
    assert len(caught.value.problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, caught.value.problems, strict=True))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name=team-a requests_per_minute=600", "line 1: the key is missing"),
        ("name=team-a", "the key is missing"),
        (f"requests_per_minute=0 {KEY}", "requests_per_minute must be a whole number of at least 1"),
        (f"requests_per_minute=many {KEY}", "requests_per_minute must be a whole number"),
        (f"requests_per_hour=5 {KEY}", "line 1: expected KEY"),
        (f"tenant={KEY}", "line 1: expected KEY"),
        (f"name=a name=b {KEY}", "name is set twice"),
        (f"name=a b:{KEY}", "the name is set twice"),
        (f"name=ä {KEY}", "a name of 1 to 64 letters"),
        (f"a:{KEY}\n\nmax_concurrent=2 a:{OTHER}", "lines 1 and 3: keys of one name"),
    ],
)
def test_wrong_line_is_explained(text: str, part: str) -> None:
    with pytest.raises(KeyFileError, match=part) as caught:
        parse_keys(text, "keys")
    assert KEY not in str(caught.value)


HASHED = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


@pytest.mark.parametrize(
    ("line", "name", "limits"),
    [
        (KEY, None, {}),
        (HASHED, None, {}),
        (f"max_concurrent=3 {HASHED}", None, {"max_concurrent": 3}),
        (f"team-a:{KEY}", "team-a", {}),
        (f"team-a:{HASHED}", "team-a", {}),
        (f"name=team-a {KEY}", "team-a", {}),
        (f"requests_per_minute=6 team-a:{KEY}", "team-a", {"requests_per_minute": 6}),
        (f"  name=team-a requests_per_minute=600 {HASHED}  ", "team-a", {"requests_per_minute": 600}),
        (
            f"max_concurrent=2 tokens_per_minute=5 team-b:{HASHED}",
            "team-b",
            {"max_concurrent": 2, "tokens_per_minute": 5},
        ),
        (
            f"name=team-a requests_per_minute=600   tokens_per_minute=200000\tmax_concurrent=32 {HASHED}",
            "team-a",
            {"requests_per_minute": 600, "tokens_per_minute": 200000, "max_concurrent": 32},
        ),
    ],
)
def test_line_is_a_key_with_its_settings(line: str, name: str | None, limits: dict[str, int]) -> None:
    (key,) = parse_keys(f"# comment\n\n{line}\n", "keys")
    assert (key.name, key.limits) == (name, KeyLimits(**limits))
    assert key.tenant == (name or f"key-{HASHED[7:15]}")
    assert key.digest == hashlib.sha256(KEY.encode()).digest()


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((f"team-a:{KEY}", f"team-b:{OTHER}", f"team-b:{KEY}"), ("lines 1 and 3", "team-a and team-b")),
        ((f"name=team-a {KEY}", f"team-b:{HASHED}"), ("lines 1 and 2", "team-a and team-b")),
        ((KEY, f"team-b:{KEY}"), ("lines 1 and 2", f"key-{HASHED[7:15]} and team-b")),
    ],
)
def test_a_key_of_two_names_is_refused(lines: tuple[str, ...], parts: tuple[str, str]) -> None:
    with pytest.raises(KeyFileError) as caught:
        parse_keys("\n".join(lines), "keys")
    (problem,) = caught.value.problems
    assert all(part in problem for part in parts)
    assert KEY not in str(caught.value) and HASHED not in str(caught.value)


@pytest.mark.parametrize("lines", [(KEY, HASHED), (f"a:{KEY}", f"name=a {KEY}"), (f"a:{KEY}", f"a:{OTHER}")])
def test_a_key_may_be_repeated_and_a_name_have_several(lines: tuple[str, str]) -> None:
    assert len(parse_keys("\n".join(lines), "keys")) == 2


@pytest.mark.parametrize("line", [f"requests_per_minute=3 {KEY}", f"name=a max_concurrent=1 {KEY}"])
def test_limits_can_be_forbidden(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    KeyFile(file, SetClock())
    with pytest.raises(KeyFileError):
        KeyFile(file, SetClock(), no_limits="only the keys of --api-key-file can have limits")


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("Bearer ", None), ("", None), ("abc", None)],
)
def test_bearer_token_is_read_from_the_header(header: str, token: str | None) -> None:
    assert bearer_token(header) == token
