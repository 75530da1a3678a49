"""The sources of drafts, and the sequences that take none."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Sequence

_MOST_CANDIDATES = 32
"""The earlier places that a proposal compares, the most recent first."""
_LARGEST_TABLE = 1 << 16
MOST_NEW_TOKENS = 4096
"""The tokens that one call of ``extend`` indexes: a long prompt is indexed in several steps."""


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


class NgramIndex:
    """The n-grams of one sequence's tokens, for prompt lookup; it grows with them.

    Prompt lookup proposes the text after the last place where the most recent tokens occurred before. The index is that
    of LZ77 compression: a table of hashes of the shortest n-gram, and for each position the previous one with the same
    hash. A new token costs one entry, and a proposal costs a few comparisons, however long the text is.

    A proposal needs a match of ``shortest`` tokens, and prefers a longer one of up to ``longest`` tokens.
    """

    __slots__ = ("_heads", "_longest", "_mask", "_previous", "_shortest")

    def __init__(self, *, shortest: int, longest: int, most_tokens: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest, self._longest = shortest, longest
        size = min(_LARGEST_TABLE, 1 << max(4, most_tokens.bit_length()))
        self._mask = size - 1
        self._heads = array("i", [-1]) * size
        self._previous = array("i")
        """For each token, the previous position with the same hash of the n-gram that ends there; -1 for none."""

    def extend(self, token_ids: list[int]) -> bool:
        """Index the tokens that are new since the last call; return False if some are left for the next call."""
        heads, previous, shortest, mask = self._heads, self._previous, self._shortest, self._mask
        end = min(len(token_ids), len(previous) + MOST_NEW_TOKENS)
        for position in range(len(previous), end):
            if position < shortest - 1:
                previous.append(-1)
                continue
            place = hash(tuple(token_ids[position - shortest + 1 : position + 1])) & mask
            previous.append(heads[place])
            heads[place] = position
        return end == len(token_ids)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow; empty without a match. All tokens must be indexed.

        The longest match wins, and the most recent of equally long ones. A match that overlaps the end of the text is a
        repetition, which the proposal continues.
        """
        last = len(token_ids) - 1
        assert len(self._previous) == last + 1
        found, best = -1, self._shortest - 1
        candidate = self._previous[last] if last >= 0 else -1
        for _ in range(_MOST_CANDIDATES):
            if candidate < 0:
                break
            length = self._match(token_ids, candidate, last)
            if length > best:
                found, best = candidate, length
                if length == self._longest:
                    break
            candidate = self._previous[candidate]
        if found < 0:
            return []
        proposed = token_ids[found + 1 : found + 1 + most]
        period = last - found
        while len(proposed) < most:
            proposed.append(proposed[-period])
        return proposed

    def _match(self, token_ids: list[int], first: int, second: int) -> int:
        """Return how many tokens up to ``first`` equal those up to ``second``, at most the longest n-gram."""
        length = 0
        most = min(self._longest, first + 1)
        while length < most and token_ids[first - length] == token_ids[second - length]:
            length += 1
        return length


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
