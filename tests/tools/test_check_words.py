"""The check for words and docstrings that the style guide rules out."""

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check_words.py"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("the client is told why", ["told"]),
        ("Nobody asked of late.", ["Nobody", "of late"]),
        ("it can't be had, or is none", ["can't be had", "is none"]),
        ("Return True if the selector is None.", []),
        ("The pass draws a token.", ["draws a token"]),
        ("`told` is the name of a field", []),
        ("see [the record](0001-told-anew.md)", []),
        ("a retold story of lately mended-by-hand code", []),
        ("The scheduler samples a token.", []),
    ],
)
def test_words_that_the_glossary_replaces_are_found(line: str, found: list[str]) -> None:
    assert [finding.text for finding in TOOL["check_words"](1, line)] == found


def test_code_blocks_of_markdown_are_not_prose() -> None:
    text = "Start it anew:\n```\necho anew\n```\nand anew\n"
    assert [finding.line for finding in TOOL["check_prose"](text)] == [1, 5]


def test_docstrings_strings_and_comments_of_python_are_prose() -> None:
    source = '''\
"""Of the API process."""

LIMIT = 3
"""Whether it holds."""


class Pool:
    """A pool of blocks."""

    def told(self) -> str:
        """Return the reason."""
        # nobody reads it
        return f"{LIMIT} begun"
'''
    findings = TOOL["check_python"](source)
    assert [(finding.line, finding.text) for finding in findings] == [
        (1, "Of"),
        (4, "Whether"),
        (12, "nobody"),
        (13, "begun"),
    ]


def test_long_names_of_tests_are_found() -> None:
    long = "test_" + "x" * 60
    source = f"def test_{'x' * 59}():\n    pass\n\n\ndef {long}():\n    pass\n"
    assert [(finding.line, finding.text) for finding in TOOL["check_python"](source)] == [(5, long)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_a_fault_is_told_in_a_line", ["told"]),
        ("test_what_nobody_begun_is_said", ["begun", "is_said", "nobody"]),
        ("test_a_crash_is_mended", ["mended"]),
        ("test_device_fault_is_reported_in_one_line", []),
        ("test_a_retold_amendment_is_saidless", []),
    ],
)
def test_words_that_names_of_tests_avoid_are_found(name: str, words: list[str]) -> None:
    findings = TOOL["check_python"](f"def {name}():\n    pass\n")
    assert [finding.text for finding in findings] == [name] * len(words)
    assert [finding.advice.rpartition(" ")[2] for finding in findings] == words
