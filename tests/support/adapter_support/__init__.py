"""Adapters for tests: folders in PEFT's layout with random matrices, and base models with an adapter merged."""
