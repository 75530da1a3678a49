"""From the blocks of an answer to the messages and events of Anthropic's API."""

from typing import Any

import msgspec

from quire_engine.errors import RequestError
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.http.problems import error_body
from quire_engine.server.openai.answer_blocks import AnswerBlocks, Block, Change, Closed, Grown, Opened
from quire_engine.server.openai.usage import UsageReport

_encode = msgspec.json.Encoder().encode
_ERROR_PATH = "/v1/messages"


def _event(payload: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), _encode(payload))


class MessageWriter:
    """A writer of the one answer to a request; ``input_tokens`` does not count what the prefix cache had."""

    def __init__(self, *, id: str, model: str, choices: list[Choice], blocks: AnswerBlocks) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._choice = choices[0]
        self._blocks = blocks
        self._report = UsageReport(choices, 1, None)
        self._started = False
        self._last: Delta | None = None

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta."""
        events = [] if self._started else [self._start()]
        self._started = True
        events += [_event(payload) for change in self._blocks.feed(delta) for payload in _payloads(change)]
        if delta.finish_reason is not None:
            self._last = delta
        return b"".join(events)

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return _event({"type": "message_start", "message": message})

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, in OpenAI's form, which the gateway reads."""
        return self._report.usage()

    def _usage(self) -> dict[str, Any]:
        cached = self._choice.num_cached_tokens
        return {
            "input_tokens": len(self._choice.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.num_tokens,
        }

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        assert self._last is not None, "the end of a stream before its last delta"
        delta = {"type": "message_delta", "delta": self._stop(self._last), "usage": self._usage()}
        return _event(delta) + _event({"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""
        return b"event: error\ndata: " + error_body(error, _ERROR_PATH) + b"\n\n"

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        (answer,) = answers
        self._blocks.feed(answer)
        content = [_content(block, whole=True) for block in self._blocks.blocks]
        return _encode({**self._head, "content": content, **self._stop(answer), "usage": self._usage()})

    def _stop(self, delta: Delta) -> dict[str, Any]:
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _content(block: Block, *, whole: bool) -> dict[str, Any]:
    text = block.text if whole else ""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments() if whole else {}}


def _payloads(change: Change) -> list[dict[str, Any]]:
    index = change.block.number
    match change:
        case Opened(block):
            return [{"type": "content_block_start", "index": index, "content_block": _content(block, whole=False)}]
        case Grown(block, text):
            return [{"type": "content_block_delta", "index": index, "delta": _delta(block, text)}]
        case Closed(block):
            stop = {"type": "content_block_stop", "index": index}
            if block.kind != "reasoning":
                return [stop]
            signature = {"type": "signature_delta", "signature": ""}
            return [{"type": "content_block_delta", "index": index, "delta": signature}, stop]


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}
