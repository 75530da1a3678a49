"""The memory that a model needs, and whether it fits."""
