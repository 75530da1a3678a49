"""The parts of ``compare.py``: quire and other servers, measured in interleaved runs on one machine.

``workloads`` defines the requests, ``servers`` how each server under test is started, ``process_tree`` starts and stops
it, ``turns`` measures it, ``machine`` and ``floor`` describe what the machine allows, ``results`` compares, ``table``
and ``plot`` show the results. ``started`` and ``paired`` serve the benchmarks that compare a feature with peers.
"""
