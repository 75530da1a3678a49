"""The GPU on which a kernel is launched or for which it is compiled (the part that selects its configuration)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU. ``capability`` is 90 for compute capability 9.0; ahead-of-time compilation knows only that."""

    capability: int
    device_name: str | None = None

    @property
    def is_interpreter(self) -> bool:
        return self.capability == 0


INTERPRETER = Target(capability=0, device_name="interpreter")
