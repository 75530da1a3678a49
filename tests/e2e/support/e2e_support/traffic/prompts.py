"""What the driver asks, and the only right answer to each: greedy continuations of the demo model.

They were computed by transformers in float32 (`choose_prompts`), never by quire. At every step the best logit leads the
second by at least `MARGIN` standard deviations of the logits. Rounding moves such a lead by far less: engine.md's bound
for what a batch may change is 0.001, and bfloat16 instead of float32 was seen to move it by at most `bfloat16_shift` of
the prompt, which is held under half of MARGIN. So whatever the batch, the replica and the dtype: another token is a
fault.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

MARGIN = 0.25
"""In standard deviations of a step's logits."""
BLOCK_TOKENS = 16
"""Tokens of a KV block by default."""
MODEL = Path(__file__).resolve().parents[5] / "examples" / "models" / "quire-demo"
DATA = Path(__file__).with_name("prompts.json")

FinishReason = Literal["length", "stop"]


class Kind(StrEnum):
    SHORT = "short"
    """A prompt of one block; few tokens to answer."""
    DEEP = "deep"
    """A prompt of many blocks; few tokens to answer."""
    LONG = "long"
    """A stream that lasts."""
    SHARED = "shared"
    """Chats that have several blocks in common with others of their kind, then differ."""
    CHAT = "chat"
    """Chats whose answer the model itself ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    name: str
    kind: Kind
    text: str | None
    """For /v1/completions."""
    messages: tuple[Message, ...]
    """For /v1/chat/completions, where there is no text."""
    prompt_tokens: int
    max_tokens: int
    token_ids: tuple[int, ...]
    """What greedy decoding gives, with the token that ends it."""
    answer: str
    finish_reason: FinishReason
    margin: float
    """The smallest lead of the best logit, in standard deviations."""
    bfloat16_shift: float
    """The most by which transformers in bfloat16 sees a lead differently."""

    @property
    def is_chat(self) -> bool:
        return self.text is None

    @property
    def request(self) -> dict[str, Any]:
        """The part of a body that asks for it."""
        if self.text is not None:
            return {"prompt": self.text}
        return {"messages": [asdict(message) for message in self.messages]}


@cache
def load(path: Path = DATA) -> tuple[Prompt, ...]:
    """The committed prompts."""
    return tuple(_prompt(document) for document in json.loads(path.read_text()))


def of_kind(*kinds: Kind) -> tuple[Prompt, ...]:
    return tuple(prompt for prompt in load() if prompt.kind in kinds)


def save(prompts: Sequence[Prompt], path: Path = DATA) -> None:
    """A line of the file for each, so that a change shows what changed."""
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) for prompt in prompts]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _prompt(document: dict[str, Any]) -> Prompt:
    return Prompt(
        **document
        | {
            "kind": Kind(document["kind"]),
            "messages": tuple(Message(**message) for message in document["messages"]),
            "token_ids": tuple(document["token_ids"]),
        }
    )
