"""What the Triton kernels share: what the device can do, checks on the device, tuned configurations.

Nothing here knows an op.
"""
