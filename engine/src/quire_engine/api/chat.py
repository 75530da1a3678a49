"""The route POST /v1/chat/completions: messages go through the model's chat template, answers have OpenAI's form."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import APIRouter
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    SkipValidation,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api import stream
from quire_engine.api.answer_blocks import AnswerPlan, reasoning_tags
from quire_engine.api.body import body_schema, json_type
from quire_engine.api.context import Context, context_of
from quire_engine.api.generation import Generation, Preparation
from quire_engine.api.limits import check_reasoning, longest_text
from quire_engine.api.logprobs import chat_logprobs, prompt_logprobs
from quire_engine.api.output import Choice, Delta
from quire_engine.api.rendering_worker import Conversation
from quire_engine.api.request import (
    AnswerLimits,
    ValidatedRequest,
    created_at,
    grammar_of,
    read_request,
    start_generation,
    validate,
)
from quire_engine.api.schemas import MAX_FIELDS, GenerationRequest, Strict
from quire_engine.api.stream import UsageReport, respond
from quire_engine.errors import InvalidRequest, RequestError
from quire_engine.grammar.spec import GrammarSpec

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"should be a string or an array of text parts, not {json_type(value)}")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"part {index} has the type {kind[:40]!r}; this version supports text parts only")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {index} should be {{"type": "text", "text": "…"}}')
    return value


Content = Annotated[
    SkipValidation[str | list[dict[str, str]]],
    BeforeValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _check_arguments(text: str) -> str:
    if text.strip() and not _is_json_object(text):
        raise ValueError("should be a JSON object in a string")
    return text


Arguments = Annotated[str, AfterValidator(_check_arguments)]
"""The arguments of an earlier tool call: a JSON object in a string, or an empty one."""


class FunctionCall(Strict):
    """The function of a tool call, with its arguments as JSON."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Arguments


class ToolCall(Strict):
    """A tool call of an assistant's earlier message."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a conversation. The model's chat template defines the meaning of a role.

    Further fields have no effect, because clients send back what other servers have added to a message.
    """

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_FIELDS)] | None = Field(
        None, description="The tool calls of an assistant's earlier message."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The newer name of reasoning_content.")
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: is required")
        return self


def _checked_as(model: Any) -> GetPydanticSchema:
    """Return an annotation for JSON that is checked as ``model`` and stays as the client sent it."""

    def as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        check(value)
        return value

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_wrap_validator_function(as_sent, handler(model))
    )


# A worker process renders the messages, which gets them as JSON.
Messages = Annotated[
    list[dict[str, Any]], _checked_as(Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)])
]


class FunctionDefinition(Strict):
    """A function that the model may call. Further fields have no effect."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call; the chat template shows it to the model as the client sent it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[dict[str, Any]], _checked_as(Annotated[list[Tool], Field(max_length=MAX_TOOLS)])]


def _check_tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('should be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}')
    return value


ToolChoice = Annotated[
    SkipValidation[str | dict[str, Any]],
    BeforeValidator(_check_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    reserved = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"} & value.keys()
    if reserved:
        raise ValueError(f"may not set {', '.join(sorted(reserved))}")
    return value


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]


class TemplateFields(Strict):
    """The fields, besides the messages, that decide what the chat template renders."""

    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the chat template, unless chat_template_kwargs sets it."
    )
    enable_thinking: bool | None = Field(
        None, description="A variable of the chat template, unless chat_template_kwargs sets it."
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        given = {name: value for name, value in named.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}


class SamplingExtensions(Strict):
    """Fields of vLLM that Messages and Responses accept too, with the same meaning. None: the client sets no value."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    def extensions(self) -> dict[str, Any]:
        """Return the fields that the client sets, for a chat request."""
        return {
            name: value for name in SamplingExtensions.model_fields if (value := getattr(self, name, None)) is not None
        }


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto unless set, where the request has tools.")
    parallel_tool_calls: bool | None = Field(None, description="With false, an answer has at most one tool call.")
    include_reasoning: bool | None = Field(None, description="With false, answers omit the model's reasoning.")
    add_special_tokens: bool = False
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="The most tokens of reasoning; then it is ended."
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    echo: Literal[False] | None = None

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that the answer has to call; None where the request names none."""
        name: str | None = self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None
        return name

    @property
    def tool_schemas(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of the tools that the answer may call, by name; None where it calls none."""
        if not self.tools or self.tool_choice == "none":
            return None
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @model_validator(mode="after")
    def _declared(self) -> Self:
        if self.tool_choice is None or self.tool_choice in ("none", "auto"):
            return self
        if not self.tools:
            raise ValueError("tool_choice: needs tools to choose from")
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            if name not in (self.tool_schemas or {}):
                raise ValueError(f"tool_choice: {name[:100]!r} is not one of the tools")
        return self

    @model_validator(mode="after")
    def _supported_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: is only allowed with logprobs set to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: needs add_generation_prompt set to false")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: differs from max_tokens, its older name; send only one of them")
        return self


_PROMPT_END_CHARACTERS = 64
"""The part of the prompt that shows whether it ends within the model's reasoning."""


async def start_chat(
    request: Request, context: Context, body: ChatCompletionRequest, arrived: float, *, param: str = "messages"
) -> tuple[Generation, AnswerPlan]:
    """Start the answers to a conversation. Raises RequestError.

    ``param`` is the field of the client's request that contains the messages, for errors. The request lives as long as
    its answer, which needs its messages no more: they are dropped.
    """
    check_tools(context, body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    limits = AnswerLimits(
        param=param,
        max_tokens=max_tokens,
        default_max_tokens=context.sampling_defaults.max_new_tokens,
        reserved_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    answers = body.n or 1
    # A message costs at least one token.
    with Preparation(context.services, request.state.identity, [len(body.messages)] * answers) as preparation:
        text = await context.render(conversation_of(context, body, body.messages))
        plan = AnswerPlan(
            formats=context.formats,
            prompt_end=text[-_PROMPT_END_CHARACTERS:],
            schemas=body.tool_schemas,
            include_reasoning=body.include_reasoning is not False,
            parallel_calls=body.parallel_tool_calls is not False,
            required=body.tool_choice == "required",
            forced_tool=body.forced_tool,
        )
        body.messages, body.tools = [], None
        forced = plan.constraint()
        wanted = None if plan.schemas is None else grammar_of(body)
        # A response_format is about text, which an answer with forced calls does not have.
        if forced is not None and wanted is not None and wanted.field != "response_format":
            raise InvalidRequest(
                f"tool_choice: a request can have one constraint, but {wanted.field} is another", param="tool_choice"
            )
        is_schema = wanted is not None and wanted.field == "response_format" and wanted.kind == "json_schema"
        either = plan.calls_or(wanted) if forced is None and wanted is not None and is_schema else None
        valid = await validate(
            context, body, [text], limits, add_special_tokens=body.add_special_tokens, constraint=forced or either
        )
        used = either or grammar_of(body)
        plan, valid = _with_reasoning(context, body, plan, valid, used, may_call=either is not None)
        shown = plan.shown_ids(context.tokenizer)
        generation = start_generation(
            request, context, body, valid, preparation, answers=answers, arrived=arrived, shown_ids=shown
        )
        return generation, plan


def _with_reasoning(
    context: Context,
    body: ChatCompletionRequest,
    plan: AnswerPlan,
    valid: ValidatedRequest,
    wanted: GrammarSpec | None,
    *,
    may_call: bool,
) -> tuple[AnswerPlan, ValidatedRequest]:
    """Let a grammar begin after the reasoning, and give the reasoning its budget.

    ``may_call`` says that the grammar allows calls in the place of what the client wants.
    """
    budget = body.thinking_token_budget
    if budget is not None and reasoning_tags(context.formats, context.tokenizer) is None:
        raise InvalidRequest(
            "thinking_token_budget: this model has no reasoning between tags of one token each",
            param="thinking_token_budget",
        )
    if wanted is not None and plan.constraint() is None:
        plan = replace(plan, constrained=wanted.kind != "structural_tag")
    if not plan.constrained and not may_call and budget is None:
        return plan, valid
    phase = plan.reasoning_phase(context.tokenizer, budget)
    params = [replace(sampling, reasoning_phase=phase) for sampling in valid.params]
    check_reasoning(params[0])
    return replace(plan, phase=phase), replace(valid, params=params)


def conversation_of(context: Context, body: TemplateFields, messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return what the chat template renders."""
    ready = context.engine.ready
    return Conversation(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.template_variables,
        tools=body.tools,
        max_characters=None if ready is None else longest_text(ready.max_model_len),
    )


def check_tools_are_rendered(context: Context, body: TemplateFields) -> None:
    """Raise InvalidRequest for tools that the model would not see."""
    if body.tools and context.renderer is not None and not context.formats.renders_tools:
        raise InvalidRequest(
            "tools: the model's chat template has no place for tools", param="tools", code="tools_not_supported"
        )


def check_tools(context: Context, body: ChatCompletionRequest) -> None:
    """Raise InvalidRequest for tools that the model would not see, or whose calls this server could not read."""
    if not body.tools or context.renderer is None:
        return
    check_tools_are_rendered(context, body)
    if body.tool_schemas is not None and body.tool_choice in (None, "auto") and context.formats.tools is None:
        raise InvalidRequest(
            "tools: this server does not know in which form the model writes tool calls; start it with "
            "--tool-call-parser, or set tool_choice",
            param="tools",
            code="no_tool_call_parser",
        )


router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    with context.bodies.lease() as held:
        body = await read_request(request, context, ChatCompletionRequest, held)
        generation, plan = await start_chat(request, context, body, arrived)
    writer = ChatWriter(
        context, body, f"chatcmpl-{request.state.request_id}", created_at(request), generation.choices, plan
    )
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=body.stream or False, keepalive_seconds=keepalive)


def _joined(first: Delta, second: Delta) -> Delta:
    """Return the tokens of both deltas."""
    return replace(second, token_ids=first.token_ids + second.token_ids, logprobs=first.logprobs + second.logprobs)


class ChatWriter:
    """A writer of the answers to one conversation."""

    def __init__(
        self,
        context: Context,
        body: ChatCompletionRequest,
        id: str,
        created: int,
        choices: Sequence[Choice],
        plan: AnswerPlan,
    ) -> None:
        self._tokenizer = context.tokenizer
        self._body = body
        self._choices = choices
        head = {"created": created, "model": context.answer_name(body.model)}
        self._whole_head = {"id": id, "object": "chat.completion", **head}
        self._chunk_head = {"id": id, "object": "chat.completion.chunk", **head}
        self._usage = UsageReport(choices, len(choices), body.stream_options)
        answers = [plan.answer(context.tokenizer) for _ in choices]
        # By answer; empty where answers are plain text.
        self._parsed = [answer for answer in answers if answer is not None]
        if any(answer.reasoning_tokens is not None for answer in self._parsed):
            self._usage.reasoning_tokens = lambda: sum(answer.reasoning_tokens or 0 for answer in self._parsed)
        self._held: dict[int, Delta] = {}
        self._started: set[int] = set()
        # By answer, if nothing but the text changes from event to event.
        self._plain: dict[int, stream.TextEvent] = {}

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first event of an answer has its role."""
        plain = self._plain.get(delta.index)
        if plain is not None and delta.finish_reason is None:
            return plain.event(delta.text)
        opening = self._opening(delta.index)
        if self._parsed:
            return opening + self._parsed_events(delta)
        part = {"content": delta.text} if delta.text else {}
        return opening + self._event(delta, part, delta.finish_reason, delta.stop_reason)

    def _opening(self, index: int) -> bytes:
        """Return the first event of an answer, if it was not sent before."""
        if index in self._started:
            return b""
        self._started.add(index)
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        # The first of the answers reports the prompt, before its own first token.
        about_prompt = self._about_prompt() if index == 0 else {}
        if not (self._parsed or self._body.logprobs or self._body.return_token_ids or self._usage.in_every_chunk):
            self._plain[index] = stream.TextEvent(lambda text: self._payload(index, {"delta": {"content": text}}, None))
        return stream.event({**self._payload(index, first, None), **about_prompt})

    def _parsed_events(self, delta: Delta) -> bytes:
        """Return the events of the parts that the delta completes; the first has the tokens, also of earlier deltas."""
        index = delta.index
        parsed = self._parsed[index]
        parts = parsed.deltas(delta)
        held = self._held.pop(index, None)
        tokens = delta if held is None else _joined(held, delta)
        if delta.finish_reason is None and not parts:
            self._held[index] = tokens
            return b""
        *before, last = parts or [{}]
        events = []
        for part in before:
            events.append(self._event(tokens, part))
            tokens = replace(tokens, token_ids=[], logprobs=[])
        events.append(self._event(tokens, last, parsed.finish_reason(delta), delta.stop_reason))
        return b"".join(events)

    def _event(
        self,
        tokens: Delta,
        part: dict[str, Any],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        """Return the event of a new part of the message and its tokens."""
        choice: dict[str, Any] = {"delta": part}
        if tokens.logprobs:
            choice["logprobs"] = self._logprobs(tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens.token_ids
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return stream.event(self._payload(tokens.index, choice, finish_reason))

    def _payload(self, index: int, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        whole = {"index": index, "logprobs": None, "finish_reason": finish_reason, **choice}
        return {**self._chunk_head, "choices": [whole], **self._usage.chunk_fields()}

    def _about_prompt(self) -> dict[str, Any]:
        """Return the fields that report the prompt, if the request asks for any."""
        fields: dict[str, Any] = {}
        first = self._choices[0]
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(first.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, first.prompt_logprobs, self._body.prompt_logprobs
            )
        return fields

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return self._usage.usage()

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        return self._usage.last_events(self._chunk_head)

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""
        return stream.error_event(error)

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        written = [self._answer(answer) for answer in answers]
        return msgspec.json.encode(
            {**self._whole_head, "choices": written, "usage": self._usage.usage(), **self._about_prompt()}
        )

    def _answer(self, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        finish_reason: str | None = whole.finish_reason
        if self._parsed:
            parsed = self._parsed[whole.index]
            message = parsed.message(whole)
            finish_reason = parsed.finish_reason(whole)
        answer: dict[str, Any] = {
            "index": whole.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if self._body.logprobs:
            answer["logprobs"] = self._logprobs(whole)
        if self._body.return_token_ids:
            answer["token_ids"] = whole.token_ids
        return answer

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs, self._body.top_logprobs or 0)
