"""How much memory a model needs, and whether it fits."""
