"""Known answers for tests of tokenizers: the token ids that SentencePiece and mistral-common give for some texts.

    pip install mistral-common sentencepiece tiktoken
    python tools/known_tokens.py > tests/engine/text/known_tokens.json

The vocabularies are data files of the distribution mistral-common, which the tests unpack into their cache.
"""

import json
import random
from pathlib import Path

import mistral_common
import sentencepiece
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

SENTENCEPIECE = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")
TEKKEN = "tekken_240911.json"
TEXTS = [
    "",
    " ",
    "  ",
    "Hello  world",
    "Hello world",
    "  leading",
    "trailing  ",
    "\n\nnew\tline",
    "   many    spaces   here ",
    "日本語のテキスト",
    "🤗 emoji 👩‍👩‍👧 joined",
    "def f(x):\n    return x ** 2\n",
    "1234567890 3.14",
    "ñandú café Ç",
    "ß ﬁ ligature ½",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the the the theee",
    "\x00\x01\x7f",
    "мир труд май",
    "العربية",
    "हिन्दी",
    "Don't you'll we've I'M",
    "https://example.com/y?a=b&c=%20",
    "\r\n crlf",
    "▁ literal",
    "<0x0A> text",
    "tab\t\ttab",
    "\u200b zero width",
    "e\u0301 combining",
]
ALPHABET = "abcdefghijklmnopqrstuvwxyz     ,.;!?ABC0123é日本\n\t🙂'\"-_()[]{}"


def main() -> None:
    """Print the texts, and for each vocabulary the ids of each text."""
    source = random.Random(1)
    texts = TEXTS + ["".join(source.choices(ALPHABET, k=source.randint(1, 60))) for _ in range(70)]
    folder = Path(mistral_common.__file__).parent / "data"
    ids = {}
    for name in SENTENCEPIECE:
        model = sentencepiece.SentencePieceProcessor()
        model.load_from_serialized_proto((folder / name).read_bytes())
        ids[name] = [model.encode(text) for text in texts]
    tekken = Tekkenizer.from_file(folder / TEKKEN)
    ids[TEKKEN] = [tekken.encode(text, bos=False, eos=False) for text in texts]
    lines = [json.dumps({"text": text, **{name: ids[name][i] for name in ids}}) for i, text in enumerate(texts)]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
