"""The bytes that each token id adds to the text, for tokenizers whose decoder is simple enough.

Two kinds of decoder are simple: byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-like BPE with byte fallback
(Llama 2, Mistral, Gemma). For these the text is the concatenation of the tokens' bytes, so that decoding a stream is
exact and costs one lookup per token. For all others ``detokenizer`` decodes windows of text.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The bytes of each token, computed at the first lookup."""

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, str], to_bytes: Callable[[str], bytes]) -> None:
        self._backend = backend
        self._to_bytes = to_bytes
        # Added tokens are matched literally in text, so their text is their content.
        self._known = {token_id: content.encode() for token_id, content in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            # A model's vocabulary may be padded beyond that of the tokenizer: such ids have no text.
            piece = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


def token_pieces(backend: tokenizers.Tokenizer, decoder: Any, added: dict[int, str]) -> TokenPieces | None:
    """Return the pieces for a decoder of ``tokenizers``; None where the text is not the concatenation of tokens."""
    steps = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenPieces(backend, added, _byte_level_bytes)
    replacements = _fallback_replacements(steps)
    if replacements is None:
        return None

    def to_bytes(token: str) -> bytes:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return TokenPieces(backend, added, to_bytes)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    return [decoder]


def _fallback_replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
    """Return the replacements of a decoder of the form Replace*, ByteFallback, Fuse, optional leading Strip; else None.

    The strip removes a space at the start of a whole text. The text decoded here continues a prompt, so it stays.
    """
    kinds = [step["type"] for step in steps]
    replaces = [step for step in steps if step["type"] == "Replace"]
    rest = kinds[len(replaces) :]
    if kinds[: len(replaces)] != ["Replace"] * len(replaces) or rest[:2] != ["ByteFallback", "Fuse"]:
        return None
    if rest[2:] not in ([], ["Strip"]) or any("String" not in step["pattern"] for step in replaces):
        return None
    if rest[2:] and steps[-1].get("stop", 0):
        return None
    return [(step["pattern"]["String"], step["content"]) for step in replaces]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE's alphabet: printable bytes themselves, else U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


def byte_level_text(word: bytes) -> str:
    """Return bytes in byte-level BPE's alphabet."""
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in word)


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()
