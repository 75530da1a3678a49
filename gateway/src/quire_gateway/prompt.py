"""The prompt of a request as routing needs it: hashed blocks of its beginning, and an estimate of its tokens.

Between ``proxy``, which has the request's body, and the routing policy. The engine hashes blocks of tokens, each with
its parent. The gateway has no tokenizer, so it does the same with blocks of the JSON text of the prompt or messages.
"""

import msgspec

BLOCK_BYTES = 256
"""The JSON text of a block: about sixty tokens, four blocks of the engine."""
MAX_BLOCKS = 256
_HALF_LIFE_REQUESTS = 500.0
_ENOUGH_REQUESTS = 5.0
_TYPICAL_TOKENS_PER_BYTE = 0.25
_FEWEST_TOKENS_PER_BYTE, _MOST_TOKENS_PER_BYTE = 0.02, 2.0


class Prompt(msgspec.Struct):
    """The fields of a body that decide about cache hits, as the text in which they came."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


def prompt_bytes(prompt: Prompt) -> int:
    """Return the length of the prompt's text."""
    return memoryview(prompt.messages).nbytes or memoryview(prompt.prompt).nbytes


def prompt_blocks(prompt: Prompt) -> tuple[int, ...]:
    """Return a hash for each whole block of the prompt's text, each over its block and all blocks before it."""
    text = memoryview(prompt.messages) if memoryview(prompt.messages).nbytes else memoryview(prompt.prompt)
    chain = hash(bytes(prompt.cache_salt))
    blocks = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        chain = hash((chain, bytes(text[start : start + BLOCK_BYTES])))
        blocks.append(chain)
    return tuple(blocks)


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
        """The current estimate."""
        if min(self._bytes.count, self._tokens.count) < _ENOUGH_REQUESTS or self._bytes.value <= 0:
            return _TYPICAL_TOKENS_PER_BYTE
        return min(_MOST_TOKENS_PER_BYTE, max(_FEWEST_TOKENS_PER_BYTE, self._tokens.value / self._bytes.value))
