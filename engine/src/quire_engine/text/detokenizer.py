"""From the token ids of one sequence, as they are drawn, to its text: never half a character, cut at stop strings.

``server.generation`` calls it with the ids of each step. It knows nothing of sampling, messages or HTTP.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_engine.text.stop_strings import StopStrings
from quire_engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""Tokens of the prompt that a window begins with, so that spaces between tokens come out as in the whole text."""
_MAX_CHARACTER_BYTES = 4
_MAX_OPEN_TOKENS = 8
"""A character has at most four bytes, each at most a token; with more tokens open the bytes are no character."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    num_tokens: int
    """How many of the ids fed belong to the sequence: all, but where a stop string ended it before."""
    stop: str | None = None


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


def open_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> bytes:
    """The first bytes of a character in which a prompt of ids ends: the answer completes it."""
    if tokenizer.pieces is None:
        return b""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join([tokenizer.pieces[token_id] for token_id in prompt[-_MAX_CHARACTER_BYTES:]]))
    return utf8.getstate()[0]


class _BytesDecoder:
    """Adds up the tokens' bytes and decodes what is complete UTF-8."""

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
    """Asks the tokenizer for the text of the last few tokens with and without the new ones; the difference is new."""

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
    """One sequence's text. ``feed`` returns what may be shown; ``flush`` what was held back when it ended otherwise.

    Bytes that can no longer become a character turn into U+FFFD; a character still open when the sequence ends is left
    out. Stop strings do not count within the text of the first ``min_tokens`` tokens.
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
    ) -> None:
        skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        decoder = _WindowDecoder if tokenizer.pieces is None else _BytesDecoder
        self._decoder: _Decoder = decoder(tokenizer, prompt, skip)
        self._stops = StopStrings(stops, included=include_stop) if stops else None
        self._unwatched = min_tokens

    def feed(self, token_ids: Sequence[int]) -> Piece:
        if self._stops is None:
            return Piece(self._decoder.decode(token_ids), len(token_ids))
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            text = self._decoder.decode((token_id,))
            if self._unwatched > 0:
                self._unwatched -= 1
                shown.append(text)
                continue
            cut = self._stops.feed(text)
            shown.append(cut.text)
            if cut.stop is not None:
                return Piece("".join(shown), count, cut.stop)
        return Piece("".join(shown), len(token_ids))

    def flush(self) -> str:
        return "" if self._stops is None else self._stops.flush()
