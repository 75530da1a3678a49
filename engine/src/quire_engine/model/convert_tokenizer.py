"""``python -m quire_engine.model.convert_tokenizer FOLDER FILE``: writes the tokenizer of FOLDER as a tokenizer.json.

Run by ``text.conversion`` in a process of its own, so that transformers stays out of the API process.
"""

import sys

from transformers import AutoTokenizer


def main(folder: str, file: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"{type(tokenizer).__name__} has no form that the tokenizers library reads")
    backend.save(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
