"""From a conversation to answers that are generated: every route that answers chats starts them here.

The routes of other APIs translate their requests to a ``ChatCompletionRequest`` first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarSpec
from quire_engine.server.context import Context
from quire_engine.server.generation.generation import Generation, Preparation
from quire_engine.server.openai.answer_parts import AnswerPlan, reasoning_tags
from quire_engine.server.openai.chat_schemas import ChatCompletionRequest, TemplateFields
from quire_engine.server.openai.grammars import grammar_of
from quire_engine.server.openai.limits import check_reasoning, longest_text
from quire_engine.server.openai.requests import AnswerLimits, ValidatedRequest, start_generation, validate
from quire_engine.server.rendering.conversation import Conversation

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
