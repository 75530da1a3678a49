"""The frames between the server and a worker that compiles grammars."""

import msgspec

from quire_engine.grammar.spec import GrammarSpec, Vocabulary


class GrammarSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary of a worker and its bounds."""

    vocabulary: Vocabulary
    memory_bytes: int
    """The address space of the process."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to compile."""

    spec: GrammarSpec


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar of llguidance, or the reason why it cannot be compiled."""

    grammar: str = ""
    reason: str | None = None
