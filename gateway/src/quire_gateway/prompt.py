"""The prompt of a request as routing needs it: hashed blocks of its beginning, and an estimate of its tokens.

Between ``proxy``, which has the request's body, and the routing policy. The engine hashes blocks of tokens, each with
its parent. The gateway has no tokenizer, so it does the same with blocks of the JSON text of the prompt or messages.
"""

import math
import re
from dataclasses import dataclass
from itertools import islice

import msgspec

from quire_common.surrogates import repaired
from quire_gateway.errors import BadRequest

BLOCK_BYTES = 256
"""The JSON text of a block: about sixty tokens, four blocks of the engine."""
MAX_BLOCKS = 256
MAX_PROMPTS = 1_000_000
_MAX_SESSION_BYTES = 1024
_ELEMENT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\[\]"]*+\]', re.DOTALL)
"""A string, or a list of numbers, in JSON."""
_HALF_LIFE_REQUESTS = 500.0
_ENOUGH_REQUESTS = 5.0
_TYPICAL_TOKENS_PER_BYTE = 0.25
_FEWEST_TOKENS_PER_BYTE, _MOST_TOKENS_PER_BYTE = 0.02, 2.0


class Prompt(msgspec.Struct):
    """The fields of a body that decide about cache hits, as the text in which they came.

    Their order is that in which chat templates place them.
    """

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()

    @property
    def texts(self) -> tuple[memoryview, ...]:
        """The texts of the fields that the model sees; most of them are empty."""
        fields = (self.tools, self.instructions, self.system, self.messages, self.input, self.prompt)
        pairs = (self.query, self.text_1, self.documents, self.text_2)
        return tuple(memoryview(field) for field in (*fields, *pairs))


def prompt_bytes(prompt: Prompt) -> int:
    return sum(text.nbytes for text in prompt.texts)


def prompt_blocks(prompt: Prompt, *, tenant: str | None = None) -> tuple[int, ...]:
    """Return a hash for each whole block of the prompt's text, each over its block and all blocks before it.

    The tenant is that of an API key, if engines do not share prefixes between tenants.
    """
    most = MAX_BLOCKS * BLOCK_BYTES
    text = b"".join(bytes(part[:most]) for part in prompt.texts)
    chain = hash((bytes(prompt.cache_salt), tenant))
    blocks = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        chain = hash((chain, text[start : start + BLOCK_BYTES]))
        blocks.append(chain)
    return tuple(blocks)


class _Peek(Prompt):
    """The fields of a body that the gateway reads."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedRequest:
    """The model and the prompt of a body. It refers to no part of the body, which can be freed."""

    model: str | None
    """None if the body names none: then the only served model is meant."""
    is_stream: bool
    num_bytes: int
    blocks: tuple[int, ...]
    sequences: int
    """The number of prompts times that of answers; 0 if nothing is generated, 1 if they are not counted."""
    session: str | None = None
    """The key that requests of one session share: ``prompt_cache_key``, else ``user``; None without both."""


def peek_request(
    body: bytes | bytearray, *, is_generating: bool, tenant: str | None = None, counts_sequences: bool = False
) -> PeekedRequest:
    """Return a body's model and prompt, or raise ``BadRequest``. The replica validates everything else."""
    try:
        peek = _peek(body)
        # Tokenizing does not run the prompt through the model and leaves nothing in the cache.
        prompt = peek if is_generating else Prompt()
        prompts = _num_prompts(prompt) if counts_sequences else 1
    except msgspec.ValidationError as error:
        raise BadRequest(f'the body must be a JSON object with a string "model": {error}', param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is not valid JSON: it is nested too deeply") from None
    answers = _number(peek.n) if counts_sequences else 1
    return PeekedRequest(
        model=peek.model,
        is_stream=bytes(peek.stream) == b"true",
        num_bytes=prompt_bytes(prompt),
        blocks=prompt_blocks(prompt, tenant=tenant),
        sequences=prompts * answers if is_generating else 0,
        session=_session(peek.prompt_cache_key) or _session(peek.user),
    )


def _peek(body: bytes | bytearray) -> _Peek:
    try:
        return msgspec.json.decode(body, type=_Peek)
    except msgspec.DecodeError:
        original = bytes(body)
        text = repaired(original)  # as the engine reads it
        if text is original:
            raise
        return msgspec.json.decode(text, type=_Peek)


def _num_prompts(body: Prompt) -> int:
    """Return the number of prompts in a body; each document and each text of a pair is one."""
    texts = (_num_items(field) for field in (body.documents, body.text_1, body.text_2))
    # The input of an embedding has the forms of a prompt. That of a response is one text, or a list of objects.
    return max(num_prompts(memoryview(body.prompt)), num_prompts(memoryview(body.input)), *texts)


def _num_items(raw: msgspec.Raw) -> int:
    """Return the length of a JSON array; 1 for anything else."""
    try:
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    except msgspec.DecodeError:
        return 1


def num_prompts(prompt: memoryview) -> int:
    """Return the number of prompts in the JSON of the field ``prompt``, at most ``MAX_PROMPTS``.

    A list of numbers is one prompt. The elements are counted without being decoded, because they may be millions.
    """
    start = re.match(rb"\s*\[\s*(?=[\"\[])", prompt)
    if start is None:
        return 1
    return sum(1 for _ in islice(_ELEMENT.finditer(prompt, start.end()), MAX_PROMPTS))


def _session(raw: msgspec.Raw) -> str | None:
    """Return a string that is not empty; None for anything else, which the replica refuses."""
    text = bytes(memoryview(raw)[:_MAX_SESSION_BYTES])
    return text.decode(errors="replace") if len(text) > len('""') and text.startswith(b'"') else None


def _number(raw: msgspec.Raw) -> int:
    """Return a natural number, however it is written (4, 4.0, 4e0, "4"); 1 for anything else, which replicas refuse."""
    try:
        return min(MAX_PROMPTS, max(1, math.ceil(float(bytes(memoryview(raw)[:64]).strip(b'"')))))
    except (ValueError, OverflowError):
        return 1


class _Mean:
    """The mean of a stream of figures, in which older figures fade as new ones come."""

    def __init__(self) -> None:
        self.count = self._sum = 0.0

    def add(self, total: float, count: float) -> None:
        fade = 0.5 ** (count / _HALF_LIFE_REQUESTS)
        self.count = self.count * fade + count
        self._sum = self._sum * fade + total

    @property
    def value(self) -> float:
        return self._sum / self.count


class TokensPerByte:
    """The tokens per byte of one model's prompts: the engines report tokens, the gateway knows its own bytes.

    Other gateways may send to the same engines; mean tokens over mean bytes is right nevertheless.
    """

    def __init__(self) -> None:
        self._bytes = _Mean()
        self._tokens = _Mean()

    def record_bytes(self, num_bytes: int) -> None:
        """Record the length of a prompt that this gateway sends."""
        self._bytes.add(num_bytes, 1.0)

    def record_tokens(self, tokens: float, requests: float) -> None:
        """Record by how much the engine's counters of prompt tokens and requests grew."""
        if tokens >= 0 and requests > 0:
            self._tokens.add(tokens, requests)

    @property
    def value(self) -> float:
        if min(self._bytes.count, self._tokens.count) < _ENOUGH_REQUESTS or self._bytes.value <= 0:
            return _TYPICAL_TOKENS_PER_BYTE
        return min(_MOST_TOKENS_PER_BYTE, max(_FEWEST_TOKENS_PER_BYTE, self._tokens.value / self._bytes.value))
