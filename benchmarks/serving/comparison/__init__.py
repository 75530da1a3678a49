"""The parts of ``compare.py``: quire and other servers, measured in interleaved runs on one machine.

``client`` defines the requests and sends them, ``servers`` says how each server under test is started, ``process_tree``
starts and stops it, ``turns`` measures it, ``results`` has the medians and the table.
"""
