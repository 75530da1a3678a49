"""The API process's HTTP side: OpenAI-compatible routes, health, metrics. No torch, no transformers."""
