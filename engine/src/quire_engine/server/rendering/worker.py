"""A worker process that renders conversations: ``python -m quire_engine.server.rendering.worker``.

Its standard input has a ``Setup`` and then ``Conversation`` after ``Conversation``. Each of them is answered by one
``Rendered`` on standard output; all are frames of JSON with their length before them. The process ends with its input,
so that it never outlives the server. ``Setup`` bounds the processor time of a conversation and the process's memory.
"""

import os
import queue
import resource
import signal
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from quire_engine.errors import InvalidRequest
from quire_engine.server.rendering.conversation import Conversation, prompt_text
from quire_engine.text.chat_template import ChatTemplate

LENGTH_BYTES = 8


class Setup(msgspec.Struct, frozen=True, kw_only=True):
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


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def main() -> None:
    """Answer conversations until the input ends."""
    # A template must not write between the frames, and neither must a library.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = msgspec.json.decode(_read_frame(sys.stdin.buffer), type=Setup)
    template = ChatTemplate(setup.source, setup.variables)
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    signal.signal(signal.SIGPROF, _on_time)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread of its own notices the end of the input also while a conversation is rendered.
    threading.Thread(target=_read_frames, args=(frames,), daemon=True).start()
    answer = Rendered()
    while True:
        output.write(frame(answer))
        output.flush()
        answer = _answer(template, frames.get(), setup.cpu_seconds)


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


def _read_frames(frames: "queue.SimpleQueue[bytes]") -> None:
    while True:
        try:
            frames.put(_read_frame(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _read_frame(stream: BinaryIO) -> bytes:
    head = stream.read(LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if len(head) < LENGTH_BYTES or len(body) < int.from_bytes(head, "big"):
        raise EOFError
    return body


if __name__ == "__main__":
    main()
