"""From the messages of a chat to the text of a prompt, by the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.errors import InvalidRequest
from quire_engine.server.openai.schemas import Message
from quire_engine.text.chat_template import ChatTemplate, ContentForms, TextParts


def chat_prompt_text(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any] | None,
) -> str:
    """Return the prompt of a conversation. Raises InvalidRequest."""
    if template is None:
        raise InvalidRequest(
            "messages: this model has no chat template; use /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    return template.render(
        [_for_template(message, template) for message in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )


def _for_template(message: Message, template: ChatTemplate) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    if message.role == "developer" and not template.mentions("developer"):
        plain["role"] = "system"  # OpenAI's newer name for the same
    content = message.refusal or "" if message.content is None else message.content
    plain["content"] = _content_for_template(content, template.content_forms(plain["role"]))
    for call in plain.get("tool_calls", []):
        # OpenAI carries arguments as JSON in a string; templates expect the object.
        try:
            call["function"]["arguments"] = msgspec.json.decode(call["function"]["arguments"])
        except (msgspec.DecodeError, RecursionError):
            continue
    return plain


def _content_for_template(content: str | TextParts, forms: ContentForms) -> str | TextParts:
    """Return the content as the client sent it if the template reads that form: it decides how parts are joined."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if forms.parts and not forms.text else content
    return content if forms.parts else "\n".join([part["text"] for part in content])
