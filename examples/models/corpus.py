"""The corpus: Python's own help topics (`pydoc_data.topics`), split into titled sections of clean blocks.

This is the first stage of training the demo models. It converts text into `Section`s. It is pure, and gives the same
result on every machine with the same Python version. It does not depend on tokens, chats or models.
"""

import hashlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

_UNDERLINE = re.compile(r"^([*=\-~^\"'])\1{2,}$")
_SIGNATURE = re.compile(r"^(class |exception |async )?[A-Za-z_][\w.]*\(.*\)$")
_FENCE = re.compile(r"^\s*(\+[-=]|\|)")
_CODE_START = re.compile(r"^(#|@|(class|def|if|for|while|try|with)\b.*:$)")
_VERSION_NOTE = re.compile(r"^(New|Changed|Deprecated since|Removed) (in )?version ")
_LIST_ITEM = re.compile(r"^(\* |\d+\. )")
# Words that occur in English sentences but not in Python code and grammar rules.
_FUNCTION_WORDS = frozenset(
    ("the", "a", "an", "of", "to", "be", "are", "this", "that", "can", "it", "its", "which", "by", "these", "may")
    + ("will", "when", "see", "at")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A paragraph. Prose is joined into one line; code keeps its lines; an entry is the signature of a callable."""

    kind: Literal["prose", "code", "entry"]
    indent: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and the text below it, up to the next heading."""

    topic: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def text(self) -> str:
        return "\n\n".join([self.title, *(block.text for block in self.blocks)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The training and held-out sections. No held-out paragraph occurs in a training section."""

    train: tuple[Section, ...]
    held_out: tuple[Section, ...]


def build_corpus(topics: Mapping[str, str], held_out_share: float, held_out_max_chars: int = 2500) -> Corpus:
    """Split the topics into sections without repeated paragraphs, and hold out some by the hash of their title.

    Only sections up to `held_out_max_chars` are held out, because a long one would remove a whole subject from
    training.

    Topics are nested: `compound` contains the whole text of `if` and `with`. Short topics are read first, so each
    section belongs to its most specific topic, and repetitions in longer topics are dropped.
    """
    seen: set[str] = set()
    train: list[Section] = []
    held_out: list[Section] = []
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        for section in parse_sections(topic, topics[topic]):
            fresh = tuple(block for block in section.blocks if block.text not in seen)
            seen.update(block.text for block in fresh)
            if not any(block.kind == "prose" for block in fresh):
                continue
            kept = Section(topic=topic, title=section.title, blocks=fresh)
            spared = len(kept.text) > held_out_max_chars or _unit_hash(kept.title) >= held_out_share
            (train if spared else held_out).append(kept)
    return Corpus(train=tuple(train), held_out=tuple(held_out))


def parse_sections(topic: str, text: str) -> Iterator[Section]:
    """Split at underlined headings. Text before the first heading gets the name of the topic as its title."""
    title = topic
    body: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.strip() and _UNDERLINE.match(following):
            yield from _section(topic, title, body)
            title, body = line.strip(), []
        elif not _UNDERLINE.match(line):
            body.append(line)
    yield from _section(topic, title, body)


def _section(topic: str, title: str, body: list[str]) -> Iterator[Section]:
    blocks = tuple(parse_blocks("\n".join(body)))
    if blocks:
        yield Section(topic=topic, title=title, blocks=blocks)


def parse_blocks(body: str) -> Iterator[Block]:
    """Return the classified paragraphs between blank lines, without ASCII tables and footnote marks."""
    for raw in re.split(r"\n\s*\n", body.strip("\n")):
        lines = [line.rstrip() for line in raw.splitlines() if line.strip()]
        if not lines or _FENCE.match(lines[0]) or lines[0].startswith("-["):
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        stripped = [line.strip() for line in lines]
        if all(_SIGNATURE.match(line) for line in stripped):
            yield Block(kind="entry", indent=indent, text="\n".join(stripped))
        elif _is_prose(stripped):
            yield Block(kind="prose", indent=indent, text=_unwrap(stripped))
        else:
            code = textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")
            yield Block(kind="code", indent=indent, text=code)


def _is_prose(lines: list[str]) -> bool:
    if _LIST_ITEM.match(lines[0]) or _VERSION_NOTE.match(lines[0]):
        return True
    if _CODE_START.match(lines[0]) or any(">>>" in line or "::=" in line for line in lines):
        return False
    words = " ".join(lines).lower().split()
    return sum(word in _FUNCTION_WORDS for word in words) >= max(1, 0.06 * len(words)) and len(words) >= 4


def _unwrap(lines: list[str]) -> str:
    text = lines[0]
    for line in lines[1:]:
        text += _joint(text, line) + line
    return re.sub(r" {2,}", " ", text)


def _joint(text: str, line: str) -> str:
    if _LIST_ITEM.match(line):
        return "\n"
    # The documentation breaks lines within hyphenated words ("comma-" / "separated").
    return "" if re.search(r"[a-z]-$", text) and line[:1].islower() else " "


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
