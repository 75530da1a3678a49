"""``spec.autoscaling`` as text next to a decision: bounds, windows and step limits. Pure."""

import msgspec

from quire_common.quantities import format_duration
from quire_operator.domain.autoscaling.schedules import Bounds
from quire_operator.domain.resource import Autoscaling, AutoscalingMode, SelectPolicy
from quire_operator.domain.resource.scaling_limits import StepLimits


class DirectionRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The window and the step limits of one direction."""

    window_seconds: float
    steps: str | None
    """None: never."""

    def text(self, direction: str, condition: str) -> str:
        """Return the rules as text: "scale-up" or "scale-down", and the condition that a window requires."""
        if self.steps is None:
            return f"never ({direction} is disabled)"
        window = format_duration(self.window_seconds)
        when = "at once" if self.window_seconds == 0 else f"when {condition} all through {window}"
        return f"{when}, by at most {self.steps}"


class Rules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    mode: AutoscalingMode
    min_replicas: int
    max_replicas: int
    scale_up: DirectionRules
    scale_down: DirectionRules
    schedule: str | None = None
    """The reason why a schedule sets these bounds now; None if none does."""

    @property
    def enforced(self) -> bool:
        return self.mode is AutoscalingMode.ENFORCE

    @property
    def up_text(self) -> str:
        return self.scale_up.text("scale-up", "needed")

    @property
    def down_text(self) -> str:
        return self.scale_down.text("scale-down", "one fewer was enough")

    @classmethod
    def of(cls, autoscaling: Autoscaling, bounds: Bounds) -> "Rules":
        """Return the rules, with the bounds of now."""
        up, down = autoscaling.scale_up, autoscaling.scale_down
        return cls(
            mode=autoscaling.mode,
            min_replicas=bounds.min_replicas,
            max_replicas=bounds.max_replicas,
            schedule=bounds.why,
            scale_up=DirectionRules(window_seconds=up.window_seconds, steps=_steps(up)),
            scale_down=DirectionRules(window_seconds=down.window_seconds, steps=_steps(down)),
        )


def _steps(limits: StepLimits) -> str | None:
    return None if limits.select is SelectPolicy.DISABLED else str(limits)
