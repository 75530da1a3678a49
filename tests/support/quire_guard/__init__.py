"""The cost of a step in figures that a busy machine does not change: counts, and ratios to a loop of the same kind.

``counting`` counts, ``scenarios`` and ``served`` define the work, ``ratios`` divides CPU times, ``bounds`` compares.
``python -m quire_guard`` measures all of it in its own process and prints it; with ``--update`` it writes the bounds.
"""
