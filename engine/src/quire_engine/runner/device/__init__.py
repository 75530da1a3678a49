"""The parts of ``runner.device_runner``: what runs the model on a GPU, or on the CPU where Triton interprets.

``accelerator`` holds all that asks CUDA for something; the other modules work on tensors, wherever these are.
"""
