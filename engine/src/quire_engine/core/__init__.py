"""The decisions of the engine, with the standard library alone: which tokens of which sequence run in the next step.

Nothing here knows tensors, HTTP or the clock; every time is an argument.
"""
