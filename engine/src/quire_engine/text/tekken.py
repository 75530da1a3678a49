"""Mistral's tekken.json as a tokenizer of the ``tokenizers`` library: byte-level BPE in the order of token ranks.

The file holds the pattern that cuts text into words, the bytes of each token by rank, and special tokens whose ids come
first.
"""

import base64
import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from quire_engine.text.sentencepiece import Ends, NotConvertible, add_ends, merges
from quire_engine.text.token_pieces import byte_level_text

_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of files that list none, by id."""


def tekken_tokenizer(data: bytes, ends: Ends) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tekken.json. Raises NotConvertible."""
    try:
        content = json.loads(data)
        config = content["config"]
        special = _special_tokens(content.get("special_tokens"), int(config["default_num_special_tokens"]))
        count = int(config["default_vocab_size"]) - len(special)
        words = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in content["vocab"][:count]}
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotConvertible(f"it is not a tekken.json: {type(error).__name__}: {error}") from error
    try:
        words_pattern = Regex(pattern)
    except Exception as error:  # the library raises it for every error of a pattern
        raise NotConvertible(f"its pattern is not a regular expression: {error}") from error
    if len(special) < len(_FIRST_SPECIAL[:3]) or sorted(words.values()) != list(range(count)):
        raise NotConvertible(f"its ranks are not those from 0 to {count - 1}")
    vocab = {text: index for index, text in enumerate(special)}
    vocab |= {byte_level_text(word): len(special) + rank for word, rank in words.items()}
    if len(vocab) != len(special) + len(words):
        raise NotConvertible("a special token has the text of another token")
    pairs = [(byte_level_text(left), byte_level_text(right)) for left, right in merges(words, words)]
    # A word that is a token is one token, whatever its parts would merge to.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words_pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    add_ends(tokenizer, ends, bos=special[1], eos=special[2])
    return tokenizer


def _special_tokens(listed: Any, count: int) -> list[str]:
    """Return the special tokens by id; ids without a name have one with their number."""
    named = dict(enumerate(_FIRST_SPECIAL)) if listed is None else {int(t["rank"]): str(t["token_str"]) for t in listed}
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]
