"""Causal language models without a native family: transformers' own modules over our paged KV cache.

On the way of a start: ``description`` reads the folder's configuration and refuses what cannot work by its kind,
``probe`` runs the model on shapes alone and ``layers`` judges what its attention layers asked for, ``checkpoint`` loads
the weights, ``model`` runs a step, and ``self_test`` holds it to the model's own forward pass before anybody is served.

transformers is imported by these modules and nowhere else in the engine process.
"""
