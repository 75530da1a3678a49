"""The CPU instructions that really work on this machine: they are tested before use, and limited to those that work.

``self_test`` is a program of its own, which multiplies as an engine process does and may die of it. ``limits`` decides
what an engine process may use, and ``choice`` runs the self-test, keeps its findings, and holds the decision while the
engine runs. Only ``self_test`` imports torch and the kernels.
"""
