"""``spec.autoscaling`` as text next to a decision: bounds, windows and step limits. Pure."""

import msgspec

from quire_common.quantities import format_duration
from quire_operator.domain.autoscaling.schedules import Bounds
from quire_operator.domain.resource import Autoscaling, AutoscalingMode


class UpRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    window_seconds: float
    max_percent: int
    max_step: int
    period_seconds: float

    def __str__(self) -> str:
        when = (
            "at once" if self.window_seconds == 0 else f"when needed all through {format_duration(self.window_seconds)}"
        )
        if self.max_percent == 0 or self.max_step == 0:
            most = f"{self.max_step}" if self.max_step else f"{self.max_percent} %"
        else:
            most = f"{self.max_step} or {self.max_percent} %, the larger,"
        return f"{when}, by at most {most} per {format_duration(self.period_seconds)}"


class DownRules(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    window_seconds: float
    max_step: int
    period_seconds: float

    def __str__(self) -> str:
        if self.max_step == 0:
            return "never (scaleDown.maxStep is 0)"
        window = format_duration(self.window_seconds)
        when = "at once" if self.window_seconds == 0 else f"when one fewer was enough all through {window}"
        return f"{when}, by at most {self.max_step} per {format_duration(self.period_seconds)}"


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
            scale_up=UpRules(
                window_seconds=up.window_seconds,
                max_percent=up.max_percent,
                max_step=up.max_step,
                period_seconds=up.period_seconds,
            ),
            scale_down=DownRules(
                window_seconds=down.window_seconds, max_step=down.max_step, period_seconds=down.period_seconds
            ),
        )
