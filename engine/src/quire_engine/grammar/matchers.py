"""The grammars of the sequences in the engine process: where each stands, and the tokens that it allows next.

A grammar is compiled in a thread, off the step loop; a request joins the scheduler when its grammar is there. After
each step another thread lets the matchers follow the sampled tokens and fills their masks, while the next step
computes logits: llguidance releases Python's lock meanwhile. A matcher belongs to a sequence, not to its row, so that a
preemption leaves it as it is. The step loop alone calls the methods.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace

import llguidance

from quire_engine.core.batch import ConstrainedSequences, DraftedLines, TokenMasks, mask_bytes
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.grammar.compiler import LIMITS, MAX_MASK_SECONDS, make_tokenizer
from quire_engine.grammar.reasoning import ReasoningTracker, without_bits
from quire_engine.grammar.spec import Vocabulary

KEPT_GRAMMARS = 64
_TOO_COMPLEX = "the grammar is too complex: finding the tokens that it allows takes too long"
_NO_TOKEN = "no token is allowed by the grammar together with the request's other parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """A compiled grammar at its start."""

    matcher: llguidance.LLMatcher
    mask: bytes
    reason: str | None = None
    """Why it cannot be used."""


@dataclass(slots=True)
class _Constrained:
    """The grammar of one sequence, and its reasoning before it."""

    matcher: llguidance.LLMatcher | None
    eos_token_ids: tuple[int, ...]
    params: SamplingParams
    first_mask: bytes | None
    """What the grammar allows first; None without a grammar."""
    vocab_size: int
    reasoning: ReasoningTracker | None = None
    mask: bytes | None = None
    """What it allows next, with the stop tokens that the parameters forbid removed; None allows every token."""
    num_output: int = 0
    reason: str | None = None
    """Why its sequence cannot go on."""

    def follow(self, token_id: int) -> None:
        """Take in a sampled token, and fill the mask of the next one."""
        if self.reason is not None:
            return
        if self.reasoning is not None and self.reasoning.follow(token_id):
            self.num_output += 1
            self.mask = self.start_mask()
        elif self.matcher is None:
            self.mask = None
        else:
            self._follow_grammar(self.matcher, token_id)

    def masks_along(self, drafts: Sequence[int]) -> list[bytes | None]:
        """Return the masks of the next token and of the one after each draft, up to a draft that is not allowed.

        The sampled token differs from such a draft, so that nothing after it counts. What ends the sequence when its
        drafts are followed ends it only if they are accepted: the list ends there, and ``follow`` finds it again.
        """
        masks = [self.mask]
        ahead: _Constrained | None = None
        for draft in drafts:
            mask = masks[-1]
            if mask is not None and not mask[draft // 8] >> draft % 8 & 1:
                break
            if ahead is None:
                matcher = None if self.matcher is None else self.matcher.deep_copy()
                ahead = replace(self, matcher=matcher, reasoning=copy(self.reasoning))
            ahead.follow(draft)
            if ahead.reason is not None:
                break
            masks.append(ahead.mask)
        return masks

    def start_mask(self) -> bytes | None:
        """Return the mask of a token before the grammar has followed one."""
        if self.reasoning is not None:
            mask = self.reasoning.mask(self.first_mask, self.vocab_size, self.eos_token_ids)
            if self.reasoning.must_end:
                return mask
        else:
            mask = self.first_mask
        return None if mask is None or self.matcher is None else self._permitted(mask)

    def _follow_grammar(self, matcher: llguidance.LLMatcher, token_id: int) -> None:
        began = time.thread_time()
        if not matcher.consume_token(token_id):
            self.reason = _NO_TOKEN
            return
        self.num_output += 1
        mask = matcher.compute_bitmask()
        if matcher.is_error() or time.thread_time() - began > MAX_MASK_SECONDS:
            self.reason = _TOO_COMPLEX
        else:
            self.mask = self._permitted(mask)

    def _permitted(self, mask: bytes) -> bytes:
        """Return the mask without tokens that end the answer too early, unless nothing else may follow."""
        early = self.num_output < self.params.min_tokens
        stops = self.params.stop_token_ids if early else ()
        ends = (*stops, *(self.eos_token_ids if early or self.params.ignore_eos else ()))
        if not ends:
            return mask
        others = without_bits(mask, ends)
        # Counting runs in C; ``any`` would look at each of the bytes in Python.
        return others if others.count(0) < len(others) else mask


class Matchers:
    """The matchers of all constrained sequences, by the key of the sequence."""

    def __init__(self, vocab_size: int, on_compiled: Callable[[], None] = lambda: None) -> None:
        """``on_compiled`` is called in another thread when a grammar is there."""
        self._vocab_size = vocab_size
        self.on_compiled = on_compiled
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._templates: OrderedDict[str, _Template] = OrderedDict()
        self._compiling: dict[str, Future[_Template]] = {}
        self._sequences: dict[int, _Constrained] = {}
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take in the tokens of the model. It must come before the first grammar; later calls have no effect."""
        if self._tokenizer is None:
            size = self._vocab_size
            missing = [b""] * (size - len(vocabulary.tokens))
            special = {name: token_id for name, token_id in vocabulary.special_tokens.items() if token_id < size}
            ends = tuple(token_id for token_id in vocabulary.eos_token_ids if token_id < size)
            cut = replace(
                vocabulary, tokens=[*vocabulary.tokens[:size], *missing], special_tokens=special, eos_token_ids=ends
            )
            self._tokenizer = make_tokenizer(cut)
            self._eos_token_ids = ends

    def request(self, grammar: str) -> bool:
        """Ask for a grammar; False where it is not compiled yet, so that its sequence has to wait."""
        if grammar in self._templates:
            self._templates.move_to_end(grammar)
            return True
        if grammar not in self._compiling:
            future = self._compiling[grammar] = self._compiler.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self.on_compiled())
        return False

    def take_compiled(self) -> list[str]:
        """Return the grammars that are there since the last call."""
        done = [grammar for grammar, future in self._compiling.items() if future.done()]
        for grammar in done:
            self._templates[grammar] = self._compiling.pop(grammar).result()
        while len(self._templates) > KEPT_GRAMMARS + len(done):
            self._templates.popitem(last=False)
        return done

    def _compile(self, grammar: str) -> _Template:
        assert self._tokenizer is not None, "a grammar before the vocabulary"
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        reason = "the grammar is invalid or too complex" if matcher.is_error() else None
        return _Template(matcher=matcher, mask=mask, reason=reason)

    def start(self, key: int, grammar: str | None, params: SamplingParams) -> str | None:
        """Give a sequence a matcher of a grammar that is compiled, if it has one, and follow its reasoning.

        Return the reason where it cannot have a matcher.
        """
        template = None if grammar is None else self._templates[grammar]
        if template is not None and template.reason is not None:
            return template.reason
        phase = params.reasoning_phase
        constrained = _Constrained(
            None if template is None else template.matcher.deep_copy(),
            self._eos_token_ids,
            params,
            None if template is None else template.mask,
            self._vocab_size,
            None if phase is None else ReasoningTracker(phase),
        )
        constrained.mask = constrained.start_mask()
        self._sequences[key] = constrained
        return None

    def discard(self, key: int) -> None:
        """Forget a sequence that has ended; one without a grammar is not known here."""
        self._sequences.pop(key, None)

    def follow(self, keys: Iterable[int], token_ids: Iterable[int]) -> None:
        """Let the matchers follow the tokens of a step, in a thread of their own."""
        sequences = self._sequences
        if not sequences:
            return
        work = [
            (sequence, token_id)
            for key, token_id in zip(keys, token_ids, strict=True)
            if (sequence := sequences.get(key)) is not None
        ]
        if work:
            self._filling = self._filler.submit(_follow_all, work)

    def masks(self, constrained: ConstrainedSequences, lines: Sequence[DraftedLines] | None = None) -> "Masks":
        """Return the masks of the sequences that are about to sample, as soon as they are filled.

        ``lines`` has the drafts of all sequences that sample, if any has one.
        """
        if self._filling is not None:
            self._filling.result()
            self._filling = None
        masks = Masks()
        width = mask_bytes(self._vocab_size)  # llguidance has a bit more
        bits = []
        for place, key in zip(constrained.places, constrained.keys, strict=True):
            sequence = self._sequences.get(key)
            if sequence is None:
                continue  # it has ended while this step was scheduled
            if sequence.reason is not None:
                masks.failed[key] = sequence.reason
                continue
            line, drafts = (place, []) if lines is None else lines[place]
            for offset, mask in enumerate(sequence.masks_along(drafts)):
                if mask is not None:
                    masks.places.append(line + offset)
                    bits.append(mask[:width])
        masks.bits = b"".join(bits)
        assert len(masks.bits) == len(masks.places) * width
        return masks

    def close(self) -> None:
        """End the threads."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Masks:
    """The masks of one step."""

    places: list[int] = field(default_factory=list)
    bits: bytes = b""
    failed: dict[int, str] = field(default_factory=dict)
    """By key, why a sequence has no mask and cannot go on."""

    def tokens(self) -> TokenMasks | None:
        """Return the masks for the runner; None where no sequence has one."""
        return TokenMasks(places=self.places, bits=self.bits) if self.places else None


def _follow_all(work: list[tuple[_Constrained, int]]) -> None:
    for sequence, token_id in work:
        sequence.follow(token_id)
