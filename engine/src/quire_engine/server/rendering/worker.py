"""A worker process that renders conversations: ``python -m quire_engine.server.rendering.worker``.

Its frames are a ``TemplateSetup`` and then ``Conversation`` after ``Conversation``, each of which is answered by one
``Rendered``. ``TemplateSetup`` bounds the processor time of a conversation and the process's memory.
"""

import signal
from collections.abc import Callable
from typing import Any

import msgspec

from quire_engine.errors import InvalidRequest
from quire_engine.server.rendering.conversation import Conversation, prompt_text
from quire_engine.server.workers.child import answer_frames, bound_memory
from quire_engine.text.chat_template import ChatTemplate


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
