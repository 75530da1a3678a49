"""Benchmarks whose results a document or a check reads.

Run one from the repository root: ``python -m benchmarks.serving.compare``.
"""
