"""The runtime of the Triton kernels: device properties, checks on the device, tuned configurations.

Nothing here depends on a specific op.
"""
