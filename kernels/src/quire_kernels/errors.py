"""What the ops refuse.

KernelError
├── ArgumentError           a shape, stride or dtype that the op cannot take (also a ValueError)
└── UnsupportedDeviceError  no implementation for the device (also a NotImplementedError)
"""


class KernelError(Exception):
    """Any refusal by an op, before it has touched its outputs."""


class ArgumentError(KernelError, ValueError):
    """An argument that the op cannot take; the message names the op, the argument, and what would be right."""


class UnsupportedDeviceError(KernelError, NotImplementedError):
    """The op has no implementation for the device its arguments are on."""
