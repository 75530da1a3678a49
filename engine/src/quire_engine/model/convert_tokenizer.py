"""The program that converts a folder's tokenizer to tokenizer.json.

``python -m quire_engine.model.convert_tokenizer FOLDER FILE`` is run by ``text.conversion`` in its own process, so that
the API process does not import transformers.
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
