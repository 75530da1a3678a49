"""Between characters and token ids: tokenizer, chat template, detokenizer. No torch, no transformers."""
