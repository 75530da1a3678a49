"""One answer as a sequence of blocks: reasoning, text and tool calls, in the order in which the model writes them.

The APIs whose answers are lists of typed items read answers through ``AnswerBlocks``, streamed or whole.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from quire_engine.api.output import Delta
from quire_engine.core.sampling_params import ReasoningPhase
from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarError, GrammarSpec
from quire_engine.text.answers import hermes
from quire_engine.text.answers.forced import named_call, named_call_schema, required_calls, required_calls_schema
from quire_engine.text.answers.formats import AnswerFormats
from quire_engine.text.answers.reader import (
    AnswerParser,
    Arguments,
    CallStart,
    Content,
    Event,
    Format,
    Reasoning,
    Schemas,
)
from quire_engine.text.tokenizer import Tokenizer

_ID_BYTES = 12
_encode = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The plan by which the answers of one request are read."""

    formats: AnswerFormats
    prompt_end: str
    """The last characters of the prompt, which may open the model's reasoning."""
    schemas: Schemas | None
    """The schemas of the tools; None where no tool may be called."""
    include_reasoning: bool = True
    parallel_calls: bool = True
    required: bool = False
    """True where a grammar forces the answer to be calls."""
    forced_tool: str | None = None
    """The tool that a grammar forces the answer to call."""
    constrained: bool = False
    """True where a grammar leaves no place for calls in the model's own form."""
    phase: ReasoningPhase | None = None
    """The reasoning that may precede an answer which is constrained or has a budget of reasoning."""

    @property
    def _format(self) -> Format | None:
        """The format that does not depend on the model."""
        if self.forced_tool is not None:
            return named_call(self.forced_tool)
        return required_calls if self.required else None

    def constraint(self) -> GrammarSpec | None:
        """Return the constraint that the choice of tools demands. Raises InvalidRequest."""
        if self.schemas is None or self._format is None:
            return None
        try:
            schema = (
                required_calls_schema(self.schemas, several=self.parallel_calls)
                if self.forced_tool is None
                else named_call_schema(self.schemas[self.forced_tool])
            )
        except GrammarError as error:
            raise InvalidRequest(
                f"tools: cannot be compiled: {error}", param="tools", code="invalid_grammar"
            ) from error
        return GrammarSpec(kind="json_schema", text=_encode(schema).decode(), param="tools")

    def calls_or(self, wanted: GrammarSpec) -> GrammarSpec | None:
        """Return a constraint of answers that are either calls or an instance of a schema.

        It is None where no tool may be called, and where the form of the model's calls is not hermes. Arguments are any
        object, as in other answers whose calls no ``tool_choice`` forces.
        """
        tools = self.formats.tools
        if not self.schemas or tools is None or tools.format is not hermes.hermes:
            return None
        tags = [
            {
                "type": "tag",
                "begin": f'{hermes.START}\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                "end": f"}}\n{hermes.END}",
            }
            for name in self.schemas
        ]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        calls["stop_after_first"] = not self.parallel_calls
        schema = {"type": "json_schema", "json_schema": msgspec.Raw(wanted.text.encode())}
        text = msgspec.json.encode({"format": {"type": "or", "elements": [schema, calls]}}).decode()
        return GrammarSpec(kind="structural_tag", text=text, param=wanted.param)

    def answer(self, tokenizer: Tokenizer) -> "ParsedAnswer | None":
        """Return the reader of one answer; None where the answer is plain text."""
        parser = self._parser()
        if parser is None:
            return None
        tools = self.formats.tools
        return ParsedAnswer(
            parser=parser,
            include_reasoning=self.include_reasoning,
            parallel_calls=self.parallel_calls,
            id_length=None if tools is None else tools.id_length,
            counter=_reasoning_counter(self, tokenizer),
            named=self.forced_tool is not None,
        )

    def _parser(self) -> AnswerParser | None:
        if self._format is not None:
            return AnswerParser(self._format)
        if not self.constrained:
            return self.formats.parser(self.prompt_end, self.schemas)
        return None if self.phase is None else self.formats.parser(self.prompt_end, None)

    def reasoning_phase(self, tokenizer: Tokenizer, budget: int | None) -> ReasoningPhase | None:
        """Return the reasoning before an answer; None where there is no reasoning, or its tags are not a token each."""
        tags = reasoning_tags(self.formats, tokenizer)
        if tags is None or self._format is not None:
            return None
        reasoning = self.formats.reasoning
        assert reasoning is not None
        return ReasoningPhase(
            start_token_id=tags[0],
            end_token_id=tags[1],
            opened=self.formats.opens_reasoning(self.prompt_end),
            # A prompt that closes the reasoning itself switches it off.
            optional=not self.prompt_end.rstrip().endswith(reasoning.end.strip()),
            budget=budget,
        )

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that the answers' text has to contain."""
        if self._format is not None or (self.constrained and self.phase is None):
            return frozenset()
        return tokenizer.added_ids(self.formats.markers(tools=self.schemas is not None and not self.constrained))


@dataclass(slots=True)
class _ReasoningCounter:
    """The number of tokens between the tags of a model's reasoning, which are a token each."""

    start: int
    end: int
    calls: frozenset[int]
    """The tags of calls, each of which ends the reasoning unless the reasoning only mentions it."""
    within: bool
    over: bool = False
    num_tokens: int = 0
    before_calls: list[int] = field(default_factory=list)
    """The numbers of tokens before each tag of a call."""

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that follow."""
        for token_id in () if self.over else token_ids:
            if not self.within:
                self.within = token_id == self.start
            elif token_id == self.end:
                self.over = True
                return
            else:
                if token_id in self.calls:
                    self.before_calls.append(self.num_tokens)
                self.num_tokens += token_id != self.start

    def count(self, num_mentions: int) -> int:
        """Return the number of tokens of reasoning that mentions as many tags of calls."""
        return self.before_calls[num_mentions] if num_mentions < len(self.before_calls) else self.num_tokens


def reasoning_tags(formats: AnswerFormats, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the tags of a model's reasoning; None where it has none, or they are not a token each."""
    if formats.reasoning is None:
        return None
    start, end = tokenizer.added_ids([formats.reasoning.start]), tokenizer.added_ids([formats.reasoning.end])
    return (next(iter(start)), next(iter(end))) if start and end else None


def _reasoning_counter(plan: AnswerPlan, tokenizer: Tokenizer) -> _ReasoningCounter | None:
    tags = reasoning_tags(plan.formats, tokenizer)
    if tags is None or plan.required or plan.forced_tool is not None:
        return None
    tools = None if plan.schemas is None or plan.constrained else plan.formats.tools
    calls = frozenset[int]() if tools is None else tokenizer.added_ids(tools.start)
    return _ReasoningCounter(*tags, calls, plan.formats.opens_reasoning(plan.prompt_end))


@dataclass(slots=True)
class ParsedAnswer:
    """One answer that is read as it grows, streamed by ``deltas`` or whole by ``message``."""

    parser: AnswerParser
    include_reasoning: bool
    parallel_calls: bool
    id_length: int | None
    counter: _ReasoningCounter | None
    named: bool = False
    """True where the client has named the tool, so that its call is no reason for the end, as in OpenAI's API."""
    has_calls: bool = False
    has_reasoning: bool = False

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens of reasoning so far; None where they cannot be counted."""
        return None if self.counter is None else self.counter.count(self.parser.num_mentions)

    def events(self, delta: Delta) -> list[Event]:
        """Return what the delta adds to the answer, without what the request leaves out; every call has an id."""
        return [known for event in self._events(delta) if (known := self._wanted(event)) is not None]

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the new parts of the message, each as the fields of one chunk's ``delta``."""
        return [_part(event) for event in self.events(delta)]

    def finish_reason(self, delta: Delta) -> str | None:
        """Return the reason for the end in OpenAI's words."""
        return (
            "tool_calls" if self.has_calls and not self.named and delta.finish_reason == "stop" else delta.finish_reason
        )

    def message(self, whole: Delta) -> dict[str, Any]:
        """Return the message of a whole answer."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for event in self.events(whole):
            match event:
                case Content():
                    content.append(event.text)
                case Reasoning():
                    reasoning.append(event.text)
                case CallStart():
                    calls.append(_call(event))
                case Arguments():
                    calls[event.index]["function"]["arguments"] += event.text
        text = "".join(content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (calls or self.has_reasoning) else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    def _events(self, delta: Delta) -> list[Event]:
        if self.counter is not None:
            self.counter.feed(delta.token_ids)
        events = self.parser.feed(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self.parser.finish()]
        return events

    def _wanted(self, event: Event) -> Event | None:
        match event:
            case Reasoning():
                self.has_reasoning = True
                return event if self.include_reasoning else None
            case CallStart() | Arguments() if event.index and not self.parallel_calls:
                return None
            case CallStart():
                self.has_calls = True
                made = secrets.token_hex(_ID_BYTES)
                id = event.id or (f"call_{made}" if self.id_length is None else made[: self.id_length])
                return CallStart(event.index, event.name, id)
        return event


def _call(event: CallStart) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _part(event: Event) -> dict[str, Any]:
    match event:
        case Content():
            return {"content": event.text}
        case Reasoning():
            return {"reasoning_content": event.text, "reasoning": event.text}
        case CallStart():
            return {"tool_calls": [{"index": event.index, **_call(event)}]}
        case Arguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


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
