"""What a model is: its configuration, its layers by family, its weights. Knows nothing of requests or batches."""
