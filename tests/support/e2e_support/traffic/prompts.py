"""The driver's requests and the only correct answer to each: greedy continuations of the demo model.

transformers computed them in float32, never quire. At every step, the best logit leads the second one by at least a
quarter of the logits' standard deviation. Rounding changes such a lead by far less: the bound for the effect of a batch
is 0.001, and bfloat16 instead of float32 changed it by at most the `bfloat16_shift` of the prompt, which is less than
half of it. Therefore, for every batch, replica and dtype, another token is an error.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).with_name("prompts.json")

FinishReason = Literal["length", "stop"]


class Kind(StrEnum):
    SHORT = "short"
    """A prompt of one block with a short answer."""
    DEEP = "deep"
    """A prompt of many blocks with a short answer."""
    LONG = "long"
    """A long stream."""
    SHARED = "shared"
    """Chats that share several blocks with others of this kind and then differ."""
    CHAT = "chat"
    """Chats whose answer the model ends itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    name: str
    kind: Kind
    text: str | None
    """The prompt for /v1/completions."""
    messages: tuple[Message, ...]
    """The messages for /v1/chat/completions, if there is no text."""
    prompt_tokens: int
    max_tokens: int
    token_ids: tuple[int, ...]
    """The greedy tokens, including the token that ends the answer."""
    answer: str
    finish_reason: FinishReason
    margin: float
    """The smallest lead of the best logit, in standard deviations."""
    bfloat16_shift: float
    """The largest change of a lead by bfloat16 in transformers."""

    @property
    def is_chat(self) -> bool:
        return self.text is None

    @property
    def request(self) -> dict[str, Any]:
        """Return the part of a body that contains the prompt."""
        if self.text is not None:
            return {"prompt": self.text}
        return {"messages": [asdict(message) for message in self.messages]}


@cache
def load(path: Path = DATA) -> tuple[Prompt, ...]:
    """Return the committed prompts."""
    return tuple(_prompt(document) for document in json.loads(path.read_text()))


def of_kind(*kinds: Kind) -> tuple[Prompt, ...]:
    return tuple(prompt for prompt in load() if prompt.kind in kinds)


def _prompt(document: dict[str, Any]) -> Prompt:
    return Prompt(
        **document
        | {
            "kind": Kind(document["kind"]),
            "messages": tuple(Message(**message) for message in document["messages"]),
            "token_ids": tuple(document["token_ids"]),
        }
    )
