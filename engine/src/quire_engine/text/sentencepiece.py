"""A SentencePiece model of kind BPE as a tokenizer of the ``tokenizers`` library, without the sentencepiece library.

The file is a protocol buffer, ``ModelProto``: field 1 lists the pieces (text, score, type), field 2 describes the
training, field 3 the normalizer (github.com/google/sentencepiece, sentencepiece_model.proto). SentencePiece merges the
two neighbours whose piece has the highest score; ``tokenizers`` merges by rank, so pairs are ranked by that score.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_T = TypeVar("_T", str, bytes)
_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BPE = 2
_KINDS = {1: "unigram", 3: "word", 4: "char"}


class NotConvertible(Exception):
    """A tokenizer file that cannot be converted; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The settings of tokenizer_config.json about the ends of a text."""

    add_bos: bool = True
    add_eos: bool = False
    prefix_segments: bool = True
    """True puts the leading space of a text behind each special token as well (``legacy`` in transformers)."""


def sentencepiece_tokenizer(data: bytes, ends: Ends) -> tokenizers.Tokenizer:
    """Return the tokenizer of a SentencePiece model. Raises NotConvertible."""
    if _is_tiktoken(data):
        raise NotConvertible(
            "it is a tiktoken file, which does not say how text is cut into words; save the tokenizer as "
            "tokenizer.json (transformers: tokenizer.save_pretrained)"
        )
    try:
        fields = list(_fields(data))
        pieces = [_piece(content) for number, content in fields if number == 1 and isinstance(content, bytes)]
        training = dict(_fields(_last(fields, 2)))
        normalizer = dict(_fields(_last(fields, 3)))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise NotConvertible("it is not a SentencePiece model") from error
    if not pieces:
        raise NotConvertible("it is not a SentencePiece model")
    kind = training.get(3, 1)
    if kind != _BPE:
        raise NotConvertible(
            f"it is a SentencePiece model of kind {_KINDS.get(int(kind), kind)}; only bpe is converted"
        )
    if training.get(24, 0):
        raise NotConvertible("its pieces end with the space (treat_whitespace_as_suffix)")
    if any(piece.type == _USER_DEFINED and _SPACE in piece.text for piece in pieces):
        raise NotConvertible("its user-defined pieces contain spaces; save the tokenizer as tokenizer.json")
    return _tokenizer(pieces, training, normalizer, ends, byte_fallback=bool(training.get(35, 0)))


def _is_tiktoken(data: bytes) -> bool:
    """Return whether the file lists tokens as lines of base64 and rank."""
    return re.match(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n", data) is not None


def _tokenizer(
    pieces: list[_Piece],
    training: dict[int, int | bytes],
    normalizer: dict[int, int | bytes],
    ends: Ends,
    *,
    byte_fallback: bool,
) -> tokenizers.Tokenizer:
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.type == _UNKNOWN), None)
    model = models.BPE(vocab=ids, merges=_merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = bool(normalizer.get(3, 1))
    tokenizer.normalizer = _normalizer(normalizer, prefixed=prefixed and ends.prefix_segments)
    if prefixed and not ends.prefix_segments:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(
        [AddedToken(piece.text, normalized=False) for piece in pieces if piece.type in (_UNKNOWN, _CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(piece.text, normalized=False) for piece in pieces if piece.type == _USER_DEFINED])
    add_ends(tokenizer, ends, bos=_token(pieces, training, 41, 1), eos=_token(pieces, training, 42, 2))
    return tokenizer


def _token(pieces: list[_Piece], training: dict[int, int | bytes], field: int, default: int) -> str | None:
    """Return the piece whose id is a field of the training; None where the model has no such piece."""
    token_id = training.get(field, default)
    return pieces[token_id].text if isinstance(token_id, int) and token_id < len(pieces) else None


def add_ends(tokenizer: tokenizers.Tokenizer, ends: Ends, *, bos: str | None, eos: str | None) -> None:
    """Let the tokenizer add its first and last token to a text that asks for special tokens."""
    first = [bos] if ends.add_bos and bos is not None else []
    last = [eos] if ends.add_eos and eos is not None else []
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*first, *last)],
        )


def _normalizer(settings: dict[int, int | bytes], *, prefixed: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    characters = settings.get(2, b"")
    if isinstance(characters, bytes) and characters:
        steps.append(normalizers.Precompiled(characters))
    if settings.get(4, 1):  # remove_extra_whitespaces
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    if settings.get(5, 1):  # escape_whitespaces
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _merges(pieces: list[_Piece]) -> list[tuple[str, str]]:
    """Return the pairs that join to a piece, best first."""
    mergeable = [(index, piece) for index, piece in enumerate(pieces) if piece.type in (_NORMAL, _UNUSED)]
    ids = {piece.text: index for index, piece in mergeable}
    return merges(ids, {piece.text: -piece.score for _, piece in mergeable})


def merges(ids: Mapping[_T, int], costs: Mapping[_T, float]) -> list[tuple[_T, _T]]:
    """Return the pairs that join to a token, cheapest token first; of the pairs of one token, those of lower ids."""
    found: list[tuple[float, int, int, _T, _T]] = []
    for token, cost in costs.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                found.append((cost, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, _NORMAL)
    assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
    return _Piece(text=text.decode(), score=struct.unpack("<f", score)[0], type=kind)


def _last(fields: list[tuple[int, int | bytes]], number: int) -> bytes:
    return next((content for found, content in reversed(fields) if found == number and isinstance(content, bytes)), b"")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer: numbers of varints, and bytes of everything else."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        tag = varint()
        match tag & 7:
            case 0:
                yield tag >> 3, varint()
                continue
            case 1:
                length = 8
            case 2:
                length = varint()
            case 5:
                length = 4
            case _:
                raise IndexError("no such type of field")
        if place + length > len(data):
            raise IndexError("the field is cut")
        yield tag >> 3, data[place : place + length]
        place += length
