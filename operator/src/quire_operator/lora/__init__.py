"""LLMAdapters: where they are served, what replicas report about them, and their statuses."""
