"""The sources of drafts, and the sequences that take none."""

from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.ngram import NgramIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSettings:
    """The settings of prompt lookup: how many recent tokens must have occurred before."""

    shortest: int
    longest: int


class Proposer(Protocol):
    """The source of drafts for one sequence."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow ``token_ids``, which only ever grows between calls."""


class ProposerFactory(Protocol):
    def __call__(self, sequence: Sequence) -> Proposer: ...


class NgramProposer:
    """A ``Proposer`` by prompt lookup."""

    __slots__ = ("_index",)

    def __init__(self, settings: NgramSettings, most_tokens: int) -> None:
        self._index = NgramIndex(shortest=settings.shortest, longest=settings.longest, most_tokens=most_tokens)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return self._index.propose(token_ids, most) if self._index.extend(token_ids) else []


class OpenProposer:
    """A ``Proposer`` whose drafts the runner's draft model fills in: only their number is decided here."""

    __slots__ = ()

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return [0] * most


def ngram_proposers(settings: NgramSettings) -> ProposerFactory:
    """Return a function that gives each sequence its own index."""
    return lambda sequence: NgramProposer(settings, sequence.limit)


def why_not(params: SamplingParams) -> str | None:
    """Return why verification cannot sample as the sequence would by itself; None if it can.

    These parameters change logits by the tokens sampled before, so a draft would have to be accepted before the next
    one can be verified.
    """
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.bad_words_token_ids:
        return "bad_words"
    return "min_tokens" if params.min_tokens else None
