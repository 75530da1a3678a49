"""The routes that OpenAI's clients call, with vLLM's additional fields."""
