"""quire's inference engine: a paged KV cache, one scheduling loop without phases, an OpenAI-compatible server."""

__version__ = "0.1.0"
