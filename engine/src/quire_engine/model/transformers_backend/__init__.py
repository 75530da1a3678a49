"""Causal language models without a native family: transformers' own modules with our paged KV cache.

In the order of a start: ``description`` reads the folder's configuration and rejects unsupported kinds of models,
``probe`` runs the model on shapes alone and ``layers`` evaluates what its attention layers requested, ``checkpoint``
loads the weights, ``model`` runs a step, and ``self_test`` compares it with the model's own forward pass before the
first request.

Only these modules of the engine process import transformers.
"""
