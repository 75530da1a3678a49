"""A chat template that is rendered in the test's own process, because a worker process takes time to start."""

from quire_engine.api.rendering_worker import Conversation, prompt_text
from quire_engine.text.chat_template import ChatTemplate


class InlineRenderer:
    """A renderer without workers and limits."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt of a conversation."""
        return prompt_text(self._template, conversation)
