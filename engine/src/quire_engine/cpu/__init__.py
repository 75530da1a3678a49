"""What the CPU of this machine can really do: instructions are tried before they are used, and limited to what works.

``findings`` tries them in child programs and keeps the result, ``limits`` decides what an engine process may use, and
``choice`` keeps the decision while the engine runs. Nothing here imports torch, numba or the kernels: the trials that
need them are programs of their own (``instruction_trials``, ``library_trials``).
"""
