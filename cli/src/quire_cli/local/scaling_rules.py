"""``spec.autoscaling`` as text next to a decision: bounds, windows and step limits. Pure."""

import msgspec

from quire_common.quantities import format_duration
from quire_operator.domain.autoscaling.schedules import Bounds
from quire_operator.domain.resource import Autoscaling, AutoscalingMode, SelectPolicy
from quire_operator.domain.resource.scaling_limits import StepLimits


class UpRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    window_seconds: float
    steps: str | None
    """None: never."""

    def __str__(self) -> str:
        if self.steps is None:
            return "never (scale-up is disabled)"
        window = format_duration(self.window_seconds)
        when = "at once" if self.window_seconds == 0 else f"when needed all through {window}"
        return f"{when}, by at most {self.steps}"


class DownRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    window_seconds: float
    steps: str | None
    """None: never."""

    def __str__(self) -> str:
        if self.steps is None:
            return "never (scale-down is disabled)"
        window = format_duration(self.window_seconds)
        when = "at once" if self.window_seconds == 0 else f"when one fewer was enough all through {window}"
        return f"{when}, by at most {self.steps}"


class Rules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    mode: AutoscalingMode
    min_replicas: int
    max_replicas: int
    scale_up: UpRules
    scale_down: DownRules
    schedule: str | None = None
    """The reason why a schedule sets these bounds now; None if none does."""

    @property
    def enforced(self) -> bool:
        return self.mode is AutoscalingMode.ENFORCE

    @classmethod
    def of(cls, autoscaling: Autoscaling, bounds: Bounds) -> "Rules":
        """Return the rules, with the bounds of now."""
        up, down = autoscaling.scale_up, autoscaling.scale_down
        return cls(
            mode=autoscaling.mode,
            min_replicas=bounds.min_replicas,
            max_replicas=bounds.max_replicas,
            schedule=bounds.why,
            scale_up=UpRules(window_seconds=up.window_seconds, steps=_steps(up)),
            scale_down=DownRules(window_seconds=down.window_seconds, steps=_steps(down)),
        )


def _steps(limits: StepLimits) -> str | None:
    return None if limits.select is SelectPolicy.DISABLED else str(limits)
