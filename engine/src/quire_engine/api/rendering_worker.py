"""From the messages of a request, as JSON, to the text of a prompt, in a worker process without pydantic.

A worker is ``python -m quire_engine.api.rendering_worker``.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.api.worker_process import answer_frames, bound_memory
from quire_engine.errors import InvalidRequest
from quire_engine.text.chat_template import ChatTemplate, ContentForms, TextParts

_FIELDS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning")
"""The fields of a message that a template sees, besides its content and its tool calls."""
_INSTRUCTIONS = ("system", "developer")
"""The roles of messages with instructions."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a request, which its schema has checked, and how to render them."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None
    """Further variables of the template (chat_template_kwargs)."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that the model may call, as the client declares them."""
    max_characters: int | None = None
    """The longest text that the model's context could hold."""


def prompt_text(template: ChatTemplate, conversation: Conversation) -> str:
    """Return the prompt of a conversation. Raises InvalidRequest.

    Where the template refuses or omits instructions that are not its first message, all of them become that message.
    """
    gathered = _gathered(conversation)
    if gathered is None:
        return _rendered(template, conversation)
    roles = {_role(message, template) for message in conversation.messages if message["role"] in _INSTRUCTIONS}
    if any(template.omits_instructions(first, later) for first in roles for later in roles):
        return _rendered(template, gathered)
    try:
        return _rendered(template, conversation)
    except InvalidRequest as refusal:
        try:
            return _rendered(template, gathered)
        except InvalidRequest:
            raise refusal from None


def _gathered(conversation: Conversation) -> Conversation | None:
    """Return the conversation with all instructions in its first message; None if they are there already."""
    messages = conversation.messages
    instructions = [message for message in messages if message["role"] in _INSTRUCTIONS]
    continues_them = conversation.continue_final_message and messages[-1]["role"] in _INSTRUCTIONS
    if continues_them or not any(message["role"] in _INSTRUCTIONS for message in messages[1:]):
        return None
    role = "developer" if all(message["role"] == "developer" for message in instructions) else "system"
    text = "\n\n".join(filter(None, map(_text, instructions)))
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    return msgspec.structs.replace(conversation, messages=[{"role": role, "content": text}, *others])


def _text(message: Mapping[str, Any]) -> str:
    content: str | TextParts = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _rendered(template: ChatTemplate, conversation: Conversation) -> str:
    return template.render(
        [_for_template(message, template) for message in conversation.messages],
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=conversation.variables,
        tools=conversation.tools,
    )


def _role(message: Mapping[str, Any], template: ChatTemplate) -> str:
    """Return the role for the template: most do not know developer, which is OpenAI's newer name of system."""
    role: str = message["role"]
    if role != "developer" or (template.mentions(role) and template.content_forms(role).any):
        return role
    return "system"


def _for_template(message: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    plain = {name: value for name in _FIELDS if (value := message.get(name)) is not None}
    plain["role"] = _role(message, template)
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    plain["content"] = _content_for_template(content, template.content_forms(plain["role"]))
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call_for_template(call) for call in calls]
    return plain


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    # OpenAI carries arguments as JSON in a string, which the schema has checked; templates expect the object.
    arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _content_for_template(content: str | TextParts, forms: ContentForms) -> str | TextParts:
    """Return the content as the client sent it if the template reads that form: it decides how parts are joined."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if forms.parts and not forms.text else content
    texts = [part["text"] for part in content]
    return [{"type": "text", "text": text} for text in texts] if forms.parts else "\n".join(texts)


class TemplateSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The template of a worker and its bounds."""

    source: str
    variables: dict[str, Any]
    """The variables that every conversation sees, such as bos_token."""
    cpu_seconds: float
    """The processor time that one conversation may take."""
    memory_bytes: int
    """The address space of the process."""


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a conversation, or the reason why it has no text."""

    text: str | None = None
    reason: str = ""
    code: str | None = None


class _TooSlow(BaseException):
    """The processor time of a conversation is over. No ``except Exception`` of a library may catch it."""


def main() -> None:
    """Answer conversations until the input ends."""
    answer_frames(_set_up, ready=Rendered())


def _set_up(message: bytes) -> Callable[[bytes], Rendered]:
    setup = msgspec.json.decode(message, type=TemplateSetup)
    template = ChatTemplate(setup.source, setup.variables)
    bound_memory(setup.memory_bytes)
    signal.signal(signal.SIGPROF, _on_time)
    return lambda conversation: _answer(template, conversation, setup.cpu_seconds)


def _answer(template: ChatTemplate, message: bytes, seconds: float) -> Rendered:
    try:
        conversation = msgspec.json.decode(message, type=Conversation)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            text = prompt_text(template, conversation)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooSlow:
        return too_slow(seconds)
    except MemoryError:
        return Rendered(reason="the model's chat template needs too much memory for them", code="template_too_large")
    except InvalidRequest as error:
        return Rendered(reason=error.message.removeprefix("messages: "), code=error.code)
    limit = conversation.max_characters
    if limit is not None and len(text) > limit:
        return Rendered(
            reason=f"their prompt of {len(text)} characters exceeds this model's context",
            code="context_length_exceeded",
        )
    return Rendered(text=text)


def too_slow(seconds: float) -> Rendered:
    """Return the answer to a conversation that takes too long."""
    return Rendered(
        reason=f"the model's chat template takes more than {seconds:g} s for them; send fewer messages",
        code="template_too_slow",
    )


def _on_time(number: int, stack: object) -> None:
    raise _TooSlow


if __name__ == "__main__":
    main()
