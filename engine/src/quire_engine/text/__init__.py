"""Text and token ids: tokenizer, chat template, detokenizer, stop strings. No torch, no transformers."""
