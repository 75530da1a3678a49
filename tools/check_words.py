"""Check that prose uses the words of docs/glossary.md and that docstrings are sentences.

Usage: python tools/check_words.py [PATH ...]

Without arguments, the check covers the tracked files below CLEAN. To extend it to a folder, rewrite what
`python tools/check_words.py FOLDER` reports and add the folder to CLEAN. In Python files it checks docstrings, other
strings, comments and the names of tests; in other files it checks every line outside fenced code blocks.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
CLEAN = (
    "CONTRIBUTING.md",
    "Dockerfile",
    "Makefile",
    "README.md",
    "benchmarks",
    "charts",
    "cli",
    "common",
    "crds",
    "docs",
    ":(glob)engine/src/quire_engine/*.py",
    "engine/src/quire_engine/core",
    "engine/src/quire_engine/cpu",
    "engine/src/quire_engine/fetch",
    "engine/src/quire_engine/ipc",
    "engine/src/quire_engine/model",
    "engine/src/quire_engine/runner",
    "engine/src/quire_engine/api",
    "engine/src/quire_engine/text",
    "examples",
    "gateway",
    "kernels",
    "operator",
    "requirements",
    "tests",
    "tools",
)
"""The folders and files that `make lint` checks."""
EXEMPT = ("CHANGELOG.md", "docs/glossary.md", "tools/check_words.py")
"""Files that quote the words or describe earlier versions."""
SUFFIXES = {".json", ".jinja", ".md", ".py", ".sh", ".toml", ".tpl", ".txt", ".yaml"}
NAMES = {"Dockerfile", "Makefile"}

WORDS = (
    (r"told", "reported, logged, known"),
    (r"anew", "again"),
    (r"of late", "recently"),
    (r"lest", "so that … not"),
    (r"whoever", "the client, the user, the caller"),
    (r"nobody|no one", "no client, no process"),
    (r"somebody|someone", "a client, another user"),
    (r"beside", "next to, in addition to, compared with"),
    (r"begun", "started"),
    (r"(?:is|are|was|were) (?-i:none)", "does not exist, is invalid"),
    (r"can(?:'t|not) be had", "is unavailable"),
    (r"as far as", "if, up to"),
    (r"(?:mend|mends|mended|mending)", "fix, repair"),
    (r"befalls?|befell", "happens to"),
    (r"(?:give|gives|gave|given|giving) way", "is preempted, yields"),
    (r"(?:carry|carries|carried|carrying) out", "apply, run"),
    (r"asked of(?! late)", "requested from"),
    (r"by turns", "interleaved"),
    (r"in words", "as text"),
    (r"in the midst", "during"),
    (r"turnstile", "concurrency limiter"),
    (r"surroundings", "cluster features"),
    (r"tether(?:ed|s)?|lifeline", "parent-death watcher"),
    (r"(?:draws?|drew|drawn|drawing) (?:a |the |its |one )?tokens?", "sample tokens"),
)
OPENERS = ("By", "Of", "How", "In words", "So many", "So much", "Those", "What", "Whether", "Who", "Whose", "Why")
"""First words of docstrings that are clauses rather than sentences."""

MAX_TEST_NAME = 64
"""The most characters of a test's name; what does not fit goes into its docstring."""

_WORD = re.compile(r"(?<![\w`-])(?:" + "|".join(f"({pattern})" for pattern, _ in WORDS) + r")(?![\w`-])", re.IGNORECASE)
_TEST_NAME_WORD = re.compile(
    r"(?<=_)(?:told|anew|whoever|nobody|somebody|lest|mend|mends|mended|begun|is_said|are_said)(?=_|$)"
)
_OPENER = re.compile(rf"\s*(?:{'|'.join(OPENERS)})\b")


class Finding(NamedTuple):
    line: int
    text: str
    advice: str


def main(arguments: list[str]) -> int:
    found = [f"{path}:{one.line}: {one.text}: {one.advice}" for path in files(arguments) for one in check(path)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def files(arguments: list[str]) -> Iterator[Path]:
    """Yield the tracked text files below the given paths, or below CLEAN."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(arguments or CLEAN)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        path = Path(name)
        is_text = path.suffix in SUFFIXES or path.name in NAMES
        if is_text and not any(path.is_relative_to(exempt) for exempt in EXEMPT):
            yield path


def check(path: Path) -> list[Finding]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return check_python(text) if path.suffix == ".py" else check_prose(text)


def check_prose(text: str) -> list[Finding]:
    """Return the findings in a file that is not Python."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            found += check_words(number, line)
    return found


def check_python(source: str) -> list[Finding]:
    """Return the findings in docstrings, other strings and comments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                found += check_words(node.lineno + offset, line)
        if _is_test(node):
            found += check_test_name(node.lineno, node.name)
        for line_number, docstring in _docstrings(node):
            if opener := _OPENER.match(docstring):
                advice = "start a function's docstring with an imperative verb, another with a noun phrase"
                found.append(Finding(line_number, opener.group().strip(), advice))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += check_words(token.start[0], token.string)
    return sorted(found)


def check_words(number: int, line: str) -> list[Finding]:
    """Return the words of one line that the glossary replaces. Names in backquotes are not prose."""
    prose = re.sub(r"`[^`]*`|https?://\S+|\]\([^)]*\)", "", line)
    return [
        Finding(number, match.group(), f"write {WORDS[match.lastindex - 1][1]}")
        for match in _WORD.finditer(prose)
        if match.lastindex
    ]


def check_test_name(number: int, name: str) -> list[Finding]:
    """Return a finding if the name of a test is too long, and one for each word that it should not contain."""
    found = [Finding(number, name, f"use at most {MAX_TEST_NAME} characters")] if len(name) > MAX_TEST_NAME else []
    for match in _TEST_NAME_WORD.finditer(name):
        found.append(Finding(number, name, f"state subject, condition and result without {match.group()}"))
    return found


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstring of a module, class or function, and the strings below the fields of a class or module."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text, lineno=line)):
                    yield line, text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
