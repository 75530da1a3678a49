"""Benchmarks of structured output: which schemas are enforced, whether answers are valid, and what masks cost."""
