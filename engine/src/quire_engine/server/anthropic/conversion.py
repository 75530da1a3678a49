"""From a request of Anthropic's API to the fields of the chat request that means the same. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire_engine.server.anthropic.schemas import (
    CountTokensRequest,
    CustomTool,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)


def chat_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of the chat request, of which the chat's schema may refuse more."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body), **body.extensions()}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if body.thinking is not None and body.thinking.type != "adaptive":
        chat["enable_thinking"] = body.thinking.type == "enabled"
    if body.thinking is not None and body.thinking.type == "enabled" and body.thinking.budget_tokens is not None:
        chat.setdefault("thinking_token_budget", body.thinking.budget_tokens)
    if body.thinking is not None and body.thinking.display == "omitted":
        chat["include_reasoning"] = False
    if body.output_config is not None:
        if body.output_config.effort is not None:
            chat["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": body.output_config.format.schema_},
            }
    if isinstance(body, MessagesRequest):
        named_fields = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
        chat |= {name: value for name, value in named_fields.items() if value is not None}
    if _continues(body):
        # As in Anthropic's API: a last message of the assistant is the start of the answer.
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def _continues(body: CountTokensRequest) -> bool:
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    return all(isinstance(block, TextBlock) for block in last.content)


def _tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    for message in body.messages:
        messages += _chat_messages(message)
    return messages


def _joined(content: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in content)


def _chat_messages(message: InputMessage) -> list[dict[str, Any]]:
    """Return the chat's messages of one message: each result of a tool is a message of its own."""
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if message.role == "assistant":
        return [_assistant(message.content, texts)]
    messages: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            result = _joined(block.content or [])
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
    if texts or not messages:
        messages.append({"role": message.role, "content": _joined(texts)})
    return messages


def _assistant(blocks: Sequence[Any], texts: Sequence[TextBlock]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in texts)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.input).decode()},
            }
            for call in calls
        ]
    return made
