"""The routing policy: which replica a request goes to. The gateway runs it, and so does the simulator.

``balance`` picks a replica, ``prefixes`` remembers which replicas hold the beginning of a prompt, and ``speed`` learns
from counters how fast replicas work. Nothing here does I/O or reads a clock.
"""
