"""Choose the prompts and write prompts.json.

Run `PYTHONPATH=tests/support .venv/bin/python -m e2e_support.traffic.choose_prompts` in the repository root. The
model knows Python's help texts by heart, so the candidates are the beginnings of these texts. A continuation is used as
long as the lead of every step is large, in float32 and in bfloat16. This takes minutes and needs the Python version
whose help texts the model was trained on (3.11).
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pydoc_data.topics import topics
from types import ModuleType

import torch

from e2e_support.traffic.prompts import BLOCK_TOKENS, DATA, MARGIN, MODEL, FinishReason, Kind, Message, Prompt, save
from e2e_support.traffic.reference import Reference

SHORT_ANSWER = 16
LONG_ANSWER = range(120, 401)
SHARED_BLOCKS = 4
LONG_CUTS = (14, 40)
"""The prompt length of a long stream, in tokens."""
CUTS = (8, 14, 160, 256, 400)
"""The prompt length of the other requests, in tokens."""
COUNTS = {Kind.SHORT: 6, Kind.DEEP: 6, Kind.LONG: 6, Kind.SHARED: 5, Kind.CHAT: 7}
ENOUGH = 3
"""The ratio of candidates to selected prompts."""


def main() -> None:
    torch.set_num_threads(1)
    chooser = _Chooser(Reference())
    with _training_modules() as (corpus, dialogues):
        sections = corpus.build_corpus(topics, held_out_share=0.0).train
        chooser.from_texts([section.text for section in sections])
        chooser.from_chats(
            [f"What is {name}?" for name in dialogues.COMMON_NAMES for name in dialogues.COMMON_NAMES[name]]
        )
    save(chooser.chosen())
    print(f"{len(chooser.chosen())} prompts in {DATA}")


class _Chooser:
    """A collection of sufficient candidates; `chosen` selects the best of each kind from different texts."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._found: dict[Kind, list[Prompt]] = {kind: [] for kind in Kind}

    def from_texts(self, texts: Sequence[str]) -> None:
        encoded = [self._reference.encode(text) for text in texts]
        for number, ids in enumerate(encoded):
            for cut in LONG_CUTS:
                if (text := self._begun(ids, cut)) is not None:
                    answer = self._reference.continue_greedily(ids[:cut], LONG_ANSWER[-1], MARGIN).token_ids
                    if len(answer) in LONG_ANSWER:
                        self._add(f"text-{number}-{cut}", Kind.LONG, text, (), ids[:cut], answer)
        for (number, ids), cut in product(enumerate(encoded), CUTS):
            kind = Kind.SHORT if cut <= BLOCK_TOKENS else Kind.DEEP
            if not self._has_enough(kind) and (text := self._begun(ids, cut)) is not None:
                answer = self._reference.continue_greedily(ids[:cut], SHORT_ANSWER, MARGIN).token_ids
                if len(answer) == SHORT_ANSWER:
                    self._add(f"text-{number}-{cut}", kind, text, (), ids[:cut], answer)

    def _begun(self, ids: Sequence[int], cut: int) -> str | None:
        """Return the first tokens of the text as text, or None if it is shorter or its cut changes the tokens."""
        text = self._reference.decode(ids[:cut])
        return text if cut < len(ids) and self._reference.encode(text) == ids[:cut] else None

    def _has_enough(self, kind: Kind) -> bool:
        return len(self._found[kind]) >= ENOUGH * COUNTS[kind]

    def from_chats(self, questions: Sequence[str]) -> None:
        """Add answers that end by themselves; the longest of them is the start of the chats with a common prefix."""
        for number, question in enumerate(questions):
            self._take_chat(f"chat-{number}", Kind.CHAT, (Message(role="user", content=question),))
        if not self._found[Kind.CHAT]:
            return
        opening = max(self._found[Kind.CHAT], key=lambda prompt: len(prompt.token_ids))
        shared = (*opening.messages, Message(role="assistant", content=opening.answer))
        assert len(self._reference.encode_chat(shared)) >= SHARED_BLOCKS * BLOCK_TOKENS
        for number, question in enumerate(questions):
            self._take_chat(f"shared-{number}", Kind.SHARED, (*shared, Message(role="user", content=question)))

    def _take_chat(self, name: str, kind: Kind, messages: tuple[Message, ...]) -> None:
        if self._has_enough(kind):
            return
        ids = self._reference.encode_chat(messages)
        answer = self._reference.continue_greedily(ids, LONG_ANSWER[-1], MARGIN)
        if answer.finish_reason == "stop" and len(answer.token_ids) >= SHORT_ANSWER:
            self._add(name, kind, None, messages, ids, answer.token_ids, "stop")

    def _add(
        self,
        name: str,
        kind: Kind,
        text: str | None,
        messages: tuple[Message, ...],
        ids: Sequence[int],
        answer: Sequence[int],
        finish_reason: FinishReason = "length",
    ) -> None:
        leads = self._reference.leads(ids, answer, rounded=False)
        shift = self._reference.bfloat16_shift(ids, answer)
        if min(leads) < MARGIN or shift > MARGIN / 2:
            return
        whole, begun = self._reference.decode([*ids, *answer]), self._reference.decode(ids)
        # An answer that ends within a character cannot be compared as text.
        if not whole.startswith(begun) or "\ufffd" in whole:
            return
        print(f"{kind}: {name}, {len(ids)} + {len(answer)} tokens, margin {min(leads):.2f}", flush=True)
        self._found[kind].append(
            Prompt(
                name=name,
                kind=kind,
                text=text,
                messages=messages,
                prompt_tokens=len(ids),
                max_tokens=len(answer) + (SHORT_ANSWER if finish_reason == "stop" else 0),
                token_ids=tuple(answer),
                answer=whole.removeprefix(begun),
                finish_reason=finish_reason,
                margin=round(min(leads), 4),
                bfloat16_shift=round(shift, 4),
            )
        )

    def chosen(self) -> list[Prompt]:
        return [prompt for kind in Kind for prompt in _best(self._found[kind], COUNTS[kind])]


def _best(found: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return the longest streams, and of the others those with the largest margin, without repeated answers."""

    def merit(prompt: Prompt) -> float:
        return len(prompt.token_ids) if prompt.kind is Kind.LONG else prompt.margin

    kept: list[Prompt] = []
    for prompt in sorted(found, key=merit, reverse=True):
        if not any(
            prompt.answer in other.answer or prompt.name.split("-")[:2] == other.name.split("-")[:2] for other in kept
        ):
            kept.append(prompt)
    return kept[:count]


@contextmanager
def _training_modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Import the modules next to the training script, which is not a package."""
    sys.path.insert(0, str(MODEL.parent))
    try:
        yield importlib.import_module("corpus"), importlib.import_module("dialogues")
    finally:
        sys.path.pop(0)


if __name__ == "__main__":
    main()
