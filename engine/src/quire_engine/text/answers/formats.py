"""The table of formats: their names, which are vLLM's, and how a chat template shows which of them its model writes.

``AnswerFormats`` is what a server has chosen; it makes the parser of each answer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from quire_engine.text.answers import deepseek, gemma, glm, harmony, hermes, llama, mistral, pythonic, qwen3_coder
from quire_engine.text.answers.reader import NO_SCHEMAS, AnswerParser, Format, Reader, Schemas, Steps
from quire_engine.text.answers.reasoning import reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A form in which models write tool calls."""

    names: tuple[str, ...]
    """vLLM's names."""
    format: Format
    detect: Callable[[str], bool]
    """A test of whether a chat template with this source belongs to a model of the format."""
    start: tuple[str, ...] = ()
    """The tags with which a call begins that ends a model's reasoning."""
    call: Format | None = None
    """The format of such a call."""
    markers: tuple[str, ...] = ()
    """The tags that may be special tokens."""
    id_length: int | None = None
    """The length of call ids that the chat template demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A form in which models write their reasoning."""

    names: tuple[str, ...]
    """vLLM's names."""
    start: str
    end: str
    detect: Callable[[str], bool]
    """A test of whether a chat template with this source belongs to a model of the format."""
    label: str = ""
    """A word that may follow the first tag, and is no reasoning."""
    always: bool = False
    """True where an answer begins with reasoning even if neither it nor the prompt has the first tag."""


def _has(*parts: str) -> Callable[[str], bool]:
    return lambda source: all(part in source for part in parts)


def _never(source: str) -> bool:
    return False


_HERMES_NAMES = re.compile(r"""["']arguments\b""")


def _hermes(source: str) -> bool:
    tagged = hermes.START in source and hermes.END in source and "<invoke" not in source
    return tagged and _HERMES_NAMES.search(source) is not None


_DEEPSEEK_FENCE = "```json"

_HARMONY = _has("<|channel|>", "<|message|>")

# The first whose tags a template has is chosen.
TOOL_FORMATS = (
    ToolFormat(
        names=("openai", "harmony", "gpt_oss"), format=harmony.harmony, detect=_HARMONY, markers=harmony.MARKERS
    ),
    ToolFormat(
        names=("qwen3_coder", "qwen3_xml"),
        format=qwen3_coder.qwen3_coder,
        detect=_has("<tool_call>", "<function=", "<parameter="),
        start=(qwen3_coder.CALL,),
        call=qwen3_coder.call,
        markers=(qwen3_coder.CALL, qwen3_coder.CALL_END),
    ),
    ToolFormat(
        names=("glm45", "glm47", "glm"),
        format=glm.glm,
        detect=_has(glm.CALL, glm.KEY, glm.VALUE),
        start=(glm.CALL,),
        call=glm.call,
        markers=glm.MARKERS,
    ),
    ToolFormat(
        names=("deepseek_v3",),
        format=deepseek.deepseek_v3,
        detect=_has(deepseek.CALLS, _DEEPSEEK_FENCE),
        start=(deepseek.CALLS,),
        call=deepseek.call_v3,
        markers=deepseek.MARKERS,
    ),
    ToolFormat(
        names=("deepseek_v31",),
        format=deepseek.deepseek_v31,
        detect=_has(deepseek.CALLS),
        start=(deepseek.CALLS,),
        call=deepseek.call_v31,
        markers=deepseek.MARKERS,
    ),
    ToolFormat(
        names=("mistral",),
        format=mistral.mistral,
        detect=_has(mistral.CALLS),
        start=(mistral.CALLS,),
        call=mistral.call,
        markers=mistral.MARKERS,
        id_length=9,
    ),
    ToolFormat(
        names=("functiongemma",),
        format=gemma.functiongemma,
        detect=_has(gemma.FUNCTION_GEMMA.start),
        start=(gemma.FUNCTION_GEMMA.start,),
        call=gemma.call_functiongemma,
        markers=gemma.FUNCTION_GEMMA.all,
    ),
    ToolFormat(
        names=("gemma4",),
        format=gemma.gemma4,
        detect=_has(gemma.GEMMA4.start),
        start=(gemma.GEMMA4.start,),
        call=gemma.call_gemma4,
        markers=gemma.GEMMA4.all,
    ),
    ToolFormat(
        names=("hermes", "qwen3_json"),
        format=hermes.hermes,
        detect=_hermes,
        start=(hermes.START,),
        call=hermes.call,
        markers=(hermes.START, hermes.END),
    ),
    ToolFormat(
        names=("llama3_json", "llama4_json"),
        format=llama.llama3_json,
        detect=_has("ipython", '"parameters": dictionary'),
        start=(llama.PYTHON_TAG,),
        call=llama.call,
        markers=(llama.PYTHON_TAG,),
    ),
    ToolFormat(
        names=("pythonic", "llama4_pythonic"),
        format=pythonic.pythonic,
        detect=_has("[func_name1("),
        markers=pythonic.MARKERS,
    ),
)

REASONING_FORMATS = (
    ReasoningFormat(names=("openai_gptoss", "harmony", "gpt_oss"), start="", end="", detect=_HARMONY),
    ReasoningFormat(names=("mistral",), start="[THINK]", end="[/THINK]", detect=_has("[THINK]", "[/THINK]")),
    ReasoningFormat(
        names=("gemma4",),
        start="<|channel>",
        end="<channel|>",
        label="thought\n",
        detect=_has("<|channel>thought", "<channel|>"),
    ),
    ReasoningFormat(names=("granite",), start="Here is my thought process:", end="Here is my response:", detect=_never),
    ReasoningFormat(
        names=(
            *("qwen3", "deepseek_v3", "glm45", "glm47", "holo2", "nemotron_v3", "granite_thinking_parser", "mimo"),
            *("step3p5", "ernie45", "poolside_v1", "ling3", "olmo3"),
        ),
        start="<think>",
        end="</think>",
        detect=_has("</think>"),
    ),
    ReasoningFormat(names=("deepseek_r1",), start="<think>", end="</think>", detect=_never, always=True),
    ReasoningFormat(
        names=("seed_oss",),
        start="<seed:think>",
        end="</seed:think>",
        detect=_has("<seed:think>", "</seed:think>"),
        always=True,
    ),
)

TOOL_NAMES = tuple(name for each in TOOL_FORMATS for name in each.names)
REASONING_NAMES = tuple(name for each in REASONING_FORMATS for name in each.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """The formats of one model; None where it has none that is known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    renders_tools: bool = False
    """True where the chat template has a place for tools."""

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the tags that a parser of these formats has to see, also where they are special tokens."""
        found = self.tools.markers if tools and self.tools is not None else ()
        if self.reasoning is None:
            return found
        if not self.reasoning.start:
            return (*found, *harmony.MARKERS)
        return (*found, self.reasoning.start, self.reasoning.end)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether the prompt ends within the model's reasoning."""
        if self.reasoning is None:
            return False
        end = prompt.rstrip()
        start = self.reasoning.start
        opened = bool(start) and end.endswith((start, f"{start}{self.reasoning.label}".rstrip()))
        return opened or (self.reasoning.always and not end.endswith(self.reasoning.end))

    def parser(self, prompt: str, schemas: Schemas | None) -> AnswerParser | None:
        """Return a parser for one answer to this prompt; None where the answer is plain text.

        ``schemas`` are those of the client's tools; None where it declares none, or wants no calls.
        """
        tools = None if schemas is None else self.tools
        if tools is None and self.reasoning is None:
            return None
        if (self.reasoning is not None and not self.reasoning.start) or (
            tools is not None and tools.format is harmony.harmony
        ):
            return AnswerParser(harmony.harmony, schemas or NO_SCHEMAS)
        if self.reasoning is None:
            assert tools is not None
            return AnswerParser(tools.format, schemas or NO_SCHEMAS)
        return AnswerParser(_both(self.reasoning, tools, self.opens_reasoning(prompt)), schemas or NO_SCHEMAS)


def _both(format: ReasoningFormat, tools: ToolFormat | None, opened: bool) -> Format:
    def read(reader: Reader) -> Steps:
        call, tags = (None, ()) if tools is None else (tools.call, tools.start)
        yield from reasoning(
            reader, format.start, format.end, label=format.label, opened=opened, call=call, call_tags=tags
        )
        if tools is not None:
            yield from tools.format(reader)

    return read


AUTO, NONE = "auto", "none"
_F = TypeVar("_F", ToolFormat, ReasoningFormat)


def formats_of(template: str | None, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
    """Return the formats with these names; with ``auto`` those that the source of a chat template shows."""
    return AnswerFormats(
        tools=_chosen(TOOL_FORMATS, tools, template),
        reasoning=_chosen(REASONING_FORMATS, reasoning, template),
        renders_tools=template is not None and "tools" in template,
    )


def _chosen(table: tuple[_F, ...], name: str, template: str | None) -> _F | None:
    if name == AUTO:
        return None if template is None else next((each for each in table if each.detect(template)), None)
    return next((each for each in table if name in each.names), None)
