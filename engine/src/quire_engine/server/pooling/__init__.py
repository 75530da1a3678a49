"""Embeddings, reranking and scores: what an engine that pools serves in the place of text."""
