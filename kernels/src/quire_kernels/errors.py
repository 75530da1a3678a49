"""The errors that ops raise.

KernelError
├── ArgumentError           a shape, stride or dtype that the op does not accept (also a ValueError)
└── UnsupportedDeviceError  no implementation for the device (also a NotImplementedError)
"""


class KernelError(Exception):
    """An error that an op raises before it writes any output."""


class ArgumentError(KernelError, ValueError):
    """An argument that the op does not accept; the message names the op, the argument, and what is accepted."""


class UnsupportedDeviceError(KernelError, NotImplementedError):
    """An op without an implementation for the device of its arguments."""
