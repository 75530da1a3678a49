"""The tokenizer of a model folder: tokenizer.json in the ``tokenizers`` library, with tokenizer_config.json's tokens.

``__main__`` loads it once, before anything slow; afterwards it is only read. For a folder without tokenizer.json,
``conversion`` creates one in a subprocess.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from quire_engine.errors import ModelFolderError
from quire_engine.grammar.spec import Vocabulary
from quire_engine.special_tokens import named_special_tokens
from quire_engine.text.conversion import converted_tokenizer_file
from quire_engine.text.token_pieces import TokenPieces, token_pieces


class Tokenizer:
    """A tokenizer. ``named_tokens`` are the special tokens by the names that chat templates use, such as bos_token."""

    def __init__(self, backend: tokenizers.Tokenizer, named_tokens: dict[str, str]) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.named_tokens = named_tokens
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.pieces: TokenPieces | None = token_pieces(
            backend, backend.decoder, {token_id: token.content for token_id, token in added.items()}
        )
        first, bare = (self.encode("a", add_special_tokens=special)[:1] for special in (True, False))
        self.first_token_id: int | None = first[0] if first and first != bare else None
        """The token before every prompt (BOS); None if the tokenizer puts none there."""
        self.eos_id: int | None = backend.token_to_id(named_tokens.get("eos_token", ""))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        # The batch call computes no offsets, and lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        # The batch call lets other threads run meanwhile.
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def added_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of these texts that are added tokens, special or not."""
        return frozenset(self._added_ids[text] for text in texts if text in self._added_ids)

    def vocabulary(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary | None:
        """Return the bytes of all tokens; None if tokens have no bytes by themselves, or none ends an answer."""
        added = {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()}
        pieces = token_pieces(self._backend, self._backend.decoder, added)
        ends = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if pieces is None or not ends:
            return None
        special = {added[token_id]: token_id for token_id in self.special_ids if token_id < vocab_size}
        return Vocabulary(
            tokens=[pieces[token_id] for token_id in range(vocab_size)], special_tokens=special, eos_token_ids=ends
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, for logprobs."""
        if self.pieces is not None:
            return self.pieces[token_id]
        return self.decode([token_id]).encode()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ModelFolderError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        file = converted_tokenizer_file(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        raise ModelFolderError(f"{file} is not a valid tokenizer: {error}") from error
    return Tokenizer(backend, named_special_tokens(folder))
