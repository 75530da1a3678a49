"""One answer as a sequence of blocks: reasoning, text and tool calls, in the order in which the model writes them.

The APIs whose answers are lists of typed items read answers through ``AnswerBlocks``, streamed or whole.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from quire_engine.server.generation.choice import Delta
from quire_engine.server.openai.answer_parts import AnswerPlan
from quire_engine.text.answers.reader import Arguments, CallStart, Content, Event, Reasoning
from quire_engine.text.tokenizer import Tokenizer

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """One block of an answer; ``number`` counts the blocks from 0."""

    number: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    """The tool that a call names."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; the arguments of a call, as the model wrote them."""
        return "".join(self.texts)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call as an object: where the answer was cut, with the values so far."""
        return partial_object(self.text)


@dataclass(frozen=True, slots=True)
class Opened:
    """The start of a block."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A new part of a block's text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a block."""

    block: Block


Change = Opened | Grown | Closed


def partial_object(text: str) -> dict[str, Any]:
    """Return a JSON object that may end too early, as Anthropic's client reads it; empty for anything else."""
    try:
        value = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class AnswerBlocks:
    """The blocks of one answer; at its end there is at least one, which may be an empty text."""

    def __init__(self, plan: AnswerPlan, tokenizer: Tokenizer) -> None:
        self._parsed = plan.answer(tokenizer)
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens of reasoning so far; None where they cannot be counted."""
        return None if self._parsed is None else self._parsed.reasoning_tokens

    @property
    def has_calls(self) -> bool:
        """True if the answer has a tool call."""
        return any(block.kind == "call" for block in self.blocks)

    def feed(self, delta: Delta) -> list[Change]:
        """Return what the delta changes, in order."""
        changes: list[Change] = []
        for event in self._events(delta):
            self._add(event, changes)
        if delta.finish_reason is not None:
            if not self.blocks:
                self._begin(Block(0, "text"), changes)
            self._close(changes)
        return changes

    def _events(self, delta: Delta) -> list[Event]:
        if self._parsed is not None:
            return self._parsed.events(delta)
        return [Content(delta.text)] if delta.text else []

    def _add(self, event: Event, changes: list[Change]) -> None:
        match event:
            case CallStart():
                self._begin(Block(len(self.blocks), "call", event.id or "", event.name), changes)
                return
            case Arguments():
                block = self._continued("call", changes)
            case Reasoning():
                block = self._continued("reasoning", changes)
            case Content():
                block = self._continued("text", changes)
        block.texts.append(event.text)
        changes.append(Grown(block, event.text))

    def _continued(self, kind: Kind, changes: list[Change]) -> Block:
        if self._open is not None and self._open.kind == kind:
            return self._open
        return self._begin(Block(len(self.blocks), kind), changes)

    def _begin(self, block: Block, changes: list[Change]) -> Block:
        self._close(changes)
        self._open = block
        self.blocks.append(block)
        changes.append(Opened(block))
        return block

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
            self._open = None
