"""The parts of ``runner.device_runner``, which runs the model on a GPU, or on the CPU if Triton interprets.

``accelerator`` contains all calls of CUDA; the other modules work on tensors on any device.
"""
