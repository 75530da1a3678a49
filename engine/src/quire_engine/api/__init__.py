"""The HTTP server of the API process: OpenAI-compatible routes, health, metrics. No torch, no transformers."""
