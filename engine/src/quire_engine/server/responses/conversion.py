"""From a request of the Responses API to the fields of the chat request that means the same. Pure."""

from collections.abc import Sequence
from typing import Any

from quire_engine.server.responses.schemas import (
    ContentPart,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    TextFormat,
)

Messages = list[dict[str, Any]]


def chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the chat request, of which the chat's schema may refuse more."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {
        "messages": [*instructions, *_input_messages(body.input)],
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **body.extensions(),
    }
    if body.includes_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, dict):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice["name"]}}
    else:
        chat["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    return {name: value for name, value in chat.items() if value is not None}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}


def _input_messages(items: Sequence[Item]) -> Messages:
    """Return the messages of a request's input. Reasoning, text and calls of one answer become one message."""
    messages: Messages = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _add_to_answer(messages, "content", _joined(item.content))
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case ReasoningItem():
                text = "".join(part.text for part in item.content or item.summary or ())
                _add_to_answer(messages, "reasoning_content", text)
            case FunctionCallItem():
                _add_call(messages, item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    return messages


_ORDER = ("reasoning_content", "content", "tool_calls")
"""The order of an answer's parts: what comes before the parts that a message has begins the next message."""


def _answer(messages: Messages, part: str) -> dict[str, Any]:
    """Return the message of the assistant that the part belongs to, which is new where the last one is complete."""
    last = messages[-1] if messages else {"role": "none"}
    later = _ORDER[_ORDER.index(part) + (part == "tool_calls") :]
    if last["role"] == "assistant" and not any(last.get(each) for each in later):
        return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_to_answer(messages: Messages, part: str, text: str) -> None:
    _answer(messages, part)[part] = text


def _add_call(messages: Messages, call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _answer(messages, "tool_calls").setdefault("tool_calls", []).append(call)


def _joined(content: Sequence[ContentPart]) -> str:
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
