"""From the blocks of an answer to the items and events of the Responses API."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire_engine.core.batch import TokenLogprobs
from quire_engine.errors import RequestError
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.openai.answer_blocks import AnswerBlocks, Block, Change, Closed, Grown, Opened
from quire_engine.server.openai.usage import UsageReport
from quire_engine.server.responses.schemas import ResponsesRequest

_encode = msgspec.json.Encoder(decimal_format="number").encode
_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
"""Fields of the request that the response repeats; null where the request has none."""
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields of a response that do not depend on its answer."""

    id: str
    model: str
    created_at: int
    fields: dict[str, Any]

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the response object. Its usage is its last field, which the gateway reads."""
        made: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            **self.fields,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "usage": None,
            **more,
        }
        made["usage"] = made.pop("usage")
        return made


def response_head(model: str, body: ResponsesRequest, *, defaults: dict[str, float]) -> ResponseHead:
    """Return the fields of a response that its request decides; ``defaults`` are the model's sampling parameters."""
    given = body.model_dump(
        include={*_ECHOED, "metadata", "reasoning", "text", "tool_choice", "tools"}, by_alias=True, exclude_none=True
    )
    reasoning = {"effort": None, "summary": None, **given.get("reasoning", {})}
    text = {"format": {"type": "text"}, **given.get("text", {})}
    fields = {
        **dict.fromkeys(_ECHOED),
        **given,
        "background": False,
        "metadata": given.get("metadata", {}),
        "previous_response_id": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature if body.temperature is not None else defaults.get("temperature", 1.0),
        "text": text,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p if body.top_p is not None else defaults.get("top_p", 1.0),
        "truncation": "disabled",
    }
    return ResponseHead(id=f"resp_{secrets.token_hex(24)}", model=model, created_at=int(time.time()), fields=fields)


class ResponseWriter:
    """A writer of the one answer to a request."""

    def __init__(
        self,
        head: ResponseHead,
        choices: list[Choice],
        blocks: AnswerBlocks,
        written: Callable[[Sequence[TokenLogprobs]], list[dict[str, Any]]],
    ) -> None:
        """Create a writer; ``written`` gives logprobs the form of OpenAI's API."""
        self._written = written
        self._logprobs: list[dict[str, Any]] = []
        """The logprobs of the text so far."""
        self._new_logprobs: list[dict[str, Any]] = []
        self._head = head
        self._blocks = blocks
        self._report = UsageReport(choices, 1, None)
        self._ids: list[str] = []
        self._sequence_number = 0
        self._cut = False

    # --- streams ---

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta."""
        events = [] if self._sequence_number else self._start()
        self._cut = delta.finish_reason == "length"
        self._add_logprobs(delta)
        for change in self._blocks.feed(delta):
            events += [self._event(type, **fields) for type, fields in self._changes(change)]
        return b"".join(events)

    def _add_logprobs(self, delta: Delta) -> None:
        self._new_logprobs = self._written(delta.logprobs)
        self._logprobs += self._new_logprobs

    def _start(self) -> list[bytes]:
        response = self._head.response("in_progress")
        return [self._event(type, response=response) for type in ("response.created", "response.in_progress")]

    def _event(self, type: str, **fields: Any) -> bytes:
        data = _encode({"type": type, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)

    def _changes(self, change: Change) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a change: their types and fields."""
        block = change.block
        if isinstance(change, Opened):
            self._ids.append(_PREFIXES[block.kind] + secrets.token_hex(24))
        place = {"item_id": self._ids[block.number], "output_index": block.number}
        part = {**place, "content_index": 0}
        kind = {"reasoning": "response.reasoning_text", "text": "response.output_text"}.get(block.kind, "")
        extra: dict[str, Any] = {"logprobs": self._new_logprobs} if block.kind == "text" else {}
        match change:
            case Opened():
                opened = {"output_index": block.number, "item": self._item(block, "in_progress")}
                events = [("response.output_item.added", opened)]
                if kind:
                    events.append(("response.content_part.added", {**part, "part": _part(block, "", [])}))
            case Grown(_, text):
                if kind:
                    return [(f"{kind}.delta", {**part, "delta": text, **extra})]
                return [("response.function_call_arguments.delta", {**place, "delta": text})]
            case Closed():
                text = block.text
                if kind:
                    extra = {"logprobs": self._logprobs} if block.kind == "text" else {}
                    events = [
                        (f"{kind}.done", {**part, "text": text, **extra}),
                        ("response.content_part.done", {**part, "part": _part(block, text, self._logprobs)}),
                    ]
                else:
                    done = {**place, "name": block.name, "arguments": text}
                    events = [("response.function_call_arguments.done", done)]
                item = self._item(block, self._status(block))
                events.append(("response.output_item.done", {"output_index": block.number, "item": item}))
        return events

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, in the form of chat completions, which the gateway reads."""
        return self._report.usage()

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> bytes:
        """Return the last events of a stream that failed."""
        code = _ERROR_CODES.get(error.status, "server_error")
        response = self._head.response("failed", error={"code": code, "message": error.message})
        event = self._event("response.failed", response=response)
        return event + self._event("error", code=error.code, message=error.message, param=error.param)

    # --- whole answers ---

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        (answer,) = answers
        self._cut = answer.finish_reason == "length"
        self._add_logprobs(answer)
        self._blocks.feed(answer)
        self._ids = [_PREFIXES[block.kind] + secrets.token_hex(24) for block in self._blocks.blocks]
        return _encode(self._finished())

    def _finished(self) -> dict[str, Any]:
        status = "incomplete" if self._cut else "completed"
        return self._head.response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if self._cut else None,
            output=[self._item(block, self._status(block)) for block in self._blocks.blocks],
            completed_at=None if self._cut else int(time.time()),
            usage=self._usage(),
        )

    def _usage(self) -> dict[str, Any]:
        counts = self._report.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._blocks.reasoning_tokens or 0},
            "total_tokens": counts["total_tokens"],
        }

    def _status(self, block: Block) -> str:
        """Return the status of a block that is closed: a limit cuts the last one."""
        return "incomplete" if self._cut and block is self._blocks.blocks[-1] else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._ids[block.number], "status": status}
        text = "" if status == "in_progress" else block.text
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **call}
        content = [] if status == "in_progress" else [_part(block, text, self._logprobs)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}


def _part(block: Block, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
