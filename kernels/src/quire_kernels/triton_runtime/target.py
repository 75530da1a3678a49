"""Which GPU a kernel is launched on or compiled for, as far as its configuration depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """``capability`` is 90 for compute capability 9.0. Compiling ahead of time, only that is known."""

    capability: int
    device_name: str | None = None

    @property
    def is_interpreter(self) -> bool:
        return self.capability == 0


INTERPRETER = Target(capability=0, device_name="interpreter")
