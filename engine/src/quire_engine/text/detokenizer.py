"""From the token ids of one sequence, as they are sampled, to its text: never half a character, cut at stop strings.

``server.generation`` calls it with the ids of each step. It knows nothing of sampling, messages or HTTP.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.text.stop_strings import StopStrings
from quire_engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""The tokens of context before a window, so that the spaces between tokens are those of the whole text."""
_MAX_CHARACTER_BYTES = 4
_MAX_OPEN_TOKENS = 8
"""A character has at most four bytes, each at most a token; with more tokens open the bytes are no character."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that may be shown after some tokens."""

    text: str
    num_tokens: int
    """The number of these tokens that belong to the answer: all of them, unless a stop string ended it earlier."""
    stop: str | None = None
    """The stop string that ended the text."""


def open_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> bytes:
    """Return the first bytes of a character with which a prompt of token ids ends, and which the answer completes."""
    if tokenizer.pieces is None:
        return b""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join([tokenizer.pieces[token_id] for token_id in prompt[-_MAX_CHARACTER_BYTES:]]))
    return utf8.getstate()[0]


class _BytesDecoder:
    """A decoder that concatenates the tokens' bytes and returns the characters that are complete in UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int]) -> None:
        assert tokenizer.pieces is not None
        self._pieces = tokenizer.pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(open_end(tokenizer, prompt))

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces, skip = self._pieces, self._skip
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids if token_id not in skip]))


class _WindowDecoder:
    """A decoder that compares the tokenizer's text of the last tokens with and without the new one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._shown = list(prompt[-_CONTEXT_TOKENS:])
        self._open: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([self._decode_one(token_id) for token_id in token_ids if token_id not in self._skip])

    def _decode_one(self, token_id: int) -> str:
        self._open.append(token_id)
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode([*self._shown, *self._open])
        if text.endswith(_REPLACEMENT) and len(self._open) < _MAX_OPEN_TOKENS:
            return ""
        self._shown = [*self._shown, *self._open][-_CONTEXT_TOKENS:]
        self._open = []
        return text[len(before) :]


class Detokenizer:
    """The text of one sequence. ``feed`` returns what may be shown; ``flush`` returns what is held back at the end.

    Bytes that can no longer become a character become U+FFFD; a character that is incomplete at the end is omitted.
    Stop strings do not count within the text of the first ``min_tokens`` tokens. ``shown_ids`` are special tokens
    whose text is never skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        skip = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        decoder = _WindowDecoder if tokenizer.pieces is None else _BytesDecoder
        self._decoder = decoder(tokenizer, prompt, skip)
        self._stops = StopStrings(stops, included=include_stop) if stops else None
        self._tokens_without_stops = min_tokens

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Return the text that may be shown after these tokens."""
        if self._stops is None:
            return Piece(self._decoder.decode(token_ids), len(token_ids))
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            text = self._decoder.decode((token_id,))
            if self._tokens_without_stops > 0:
                self._tokens_without_stops -= 1
                shown.append(text)
                continue
            cut = self._stops.feed(text)
            shown.append(cut.text)
            if cut.stop is not None:
                return Piece("".join(shown), count, cut.stop)
        return Piece("".join(shown), len(token_ids))

    def flush(self) -> str:
        """Return the text that is held back, when the sequence has ended without a stop string."""
        return "" if self._stops is None else self._stops.flush()
