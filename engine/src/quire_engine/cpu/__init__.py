"""The CPU instructions that really work on this machine: they are tried before use, and limited to those that work.

``findings`` tries them in child programs and keeps the result, ``limits`` decides what an engine process may use, and
``choice`` keeps the decision while the engine runs. Nothing here imports torch, numba or the kernels: the trials that
need them are separate programs (``instruction_trials``, ``library_trials``).
"""
