"""Models: their configuration, their layers by family, and their weights. Independent of requests and batches."""
