"""A writer of SentencePiece models, as small as the reader in quire_engine.text.sentencepiece needs."""

import struct
from collections.abc import Sequence


def sentencepiece_file(
    pieces: Sequence[tuple[str, float, int]],
    *training: tuple[int, int],
    normalizer: Sequence[tuple[int, int]] | None = None,
) -> bytes:
    """Return a SentencePiece model with these pieces (text, score, type) and settings (field, value) of its parts."""
    listed = b"".join(_field(1, _piece(*entry)) for entry in pieces)
    described = listed + _field(2, _settings(training))
    return described if normalizer is None else described + _field(3, _settings(normalizer))


def _piece(text: str, score: float, kind: int) -> bytes:
    return _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind])


def _settings(settings: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_varint(number << 3) + _varint(value) for number, value in settings)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    low = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(part | 0x80 for part in low[:-1]), low[-1]])
