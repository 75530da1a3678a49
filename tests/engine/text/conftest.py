"""Small tokenizers of every kind that the engine supports, built here without downloads."""

from pathlib import Path

import package_sources
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from quire_engine.text.tokenizer import Tokenizer

SPECIAL = ["<|bos|>", "<|eos|>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer of GPT-2's kind: every byte is a token, and a few merges join some of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = [("l", "l"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł"), ("Ċ", "Ċ")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in joined)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=joined))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 2's kind: words with ▁ for a space, and bytes for unknown text."""
    words = ["▁", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", "a", "!", "é", "\n"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "h"), ("e", "l"), ("l", "o")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges) if a + b not in vocabulary}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens do not concatenate to the text: the first one loses its space."""
    tokens = ["<unk>", "▁hello", "▁world", "▁", "h", "e", "l", "o", "w", "r", "d", "!"]
    backend = tokenizers.Tokenizer(
        models.Unigram([(token, -float(index)) for index, token in enumerate(tokens)], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]})


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return tokenizer_of(byte_level_backend())


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return tokenizer_of(byte_fallback_backend())


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    return tokenizer_of(metaspace_backend())


@pytest.fixture(scope="session")
def mistral_files() -> Path:
    """Return the folder of real tokenizer files of mistral-common, unpacked into the cache of the tests."""
    return package_sources.installed("tokenizers.lock") / "mistral_common" / "data"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
