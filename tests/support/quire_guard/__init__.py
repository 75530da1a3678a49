"""What a step costs, in numbers that a busy machine does not change: counts, and ratios to a loop of the same kind.

``counting`` counts, ``scenarios`` and ``served`` say what, ``ratios`` divides CPU times, ``bounds`` judges. ``python -m
quire_guard`` measures all of it in a process of its own and prints it; with ``--update`` it writes the bounds.
"""
