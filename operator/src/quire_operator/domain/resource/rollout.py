"""``spec.rollout`` and ``spec.drain``: how replicas are replaced, and how long a replica may drain."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from quire_operator.domain.resource.canary import Canary
from quire_operator.domain.resource.field_kinds import Choice, CountOrPercent, Duration
from quire_operator.domain.resource.schema import Removed, Rule, Section

_NONE = (0, "0%")


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"
    """For clusters without a spare GPU in which replicas need not be replaced one by one."""
    CANARY = "Canary"
    """A changed spec first serves a share of the requests, and replaces replicas only after it was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    strategy: Annotated[
        RolloutStrategy,
        Choice(
            "RollingUpdate replaces replicas step by step. Recreate stops all replicas before it starts new ones, for "
            "clusters without a spare GPU. Canary gives a changed spec a share of the requests first, compares it with "
            "the stable revision, and then promotes it by a rolling update or rolls it back."
        ),
    ] = RolloutStrategy.ROLLING_UPDATE
    max_surge: Annotated[
        int | str,
        CountOrPercent(
            "Maximum number of extra replicas during a rollout, or a percentage, which is rounded up. Default is 1; 0 "
            "needs no spare GPU.",
            is_default_stored=False,
        ),
    ] = 1
    max_unavailable: Annotated[
        int | str,
        CountOrPercent(
            "Maximum number of unavailable replicas during a rollout, or a percentage, which is rounded down. If the "
            "result and maxSurge are 0, one replica may be unavailable. Default is 0.",
            is_default_stored=False,
        ),
    ] = 0
    progress_deadline_seconds: Annotated[
        float | None,
        Duration(
            "Maximum time between two replicas becoming ready during a rollout. After that, the rollout has failed: no "
            "further replica is replaced, and the replicas of the previous revision stay. Default is the start-up "
            "limit of the model (40m, or 1h40m if it is downloaded).",
            minimum=10.0,
        ),
    ] = None
    windows: Annotated[
        None,
        Removed(
            "Removed: rollouts start at once. To choose the time, set spec.paused to true, and to false when replicas "
            "may be replaced.",
            type="array",
        ),
    ] = None

    canary: Annotated[
        Canary | None,
        Section("The steps and gates of strategy Canary. Without this section, the defaults apply."),
    ] = None

    RULES: ClassVar = (
        Rule(
            at="canary",
            cel="self.strategy == 'Canary' || !has(self.canary)",
            holds=lambda rollout, document: rollout.strategy is RolloutStrategy.CANARY or rollout.canary is None,
            message="is used by strategy Canary only: set strategy to Canary, or remove canary",
        ),
        Rule(
            at="maxUnavailable",
            cel="self.strategy == 'Recreate' "
            "|| !((has(self.maxSurge) ? string(self.maxSurge) : '1') in ['0', '0%']) "
            "|| !((has(self.maxUnavailable) ? string(self.maxUnavailable) : '0') in ['0', '0%'])",
            holds=lambda rollout, document: (
                rollout.strategy is RolloutStrategy.RECREATE or rollout.surges or rollout.max_unavailable not in _NONE
            ),
            message="must be at least 1 while maxSurge is 0: otherwise no replica can be replaced",
        ),
        Rule(
            cel="self.strategy != 'Recreate' || (!has(self.maxSurge) && !has(self.maxUnavailable))",
            holds=lambda rollout, document: (
                rollout.strategy is not RolloutStrategy.RECREATE
                or not (document.has("maxSurge") or document.has("maxUnavailable"))
            ),
            message="strategy Recreate does not use maxSurge and maxUnavailable: remove both",
        ),
    )

    @property
    def canary_policy(self) -> Canary | None:
        """The steps and gates; None if a changed spec replaces replicas at once."""
        return (self.canary or Canary()) if self.strategy is RolloutStrategy.CANARY else None

    @property
    def surges(self) -> bool:
        """Return True if replicas are added before others are removed."""
        return self.max_surge not in _NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    timeout_seconds: Annotated[
        float,
        Duration(
            "Maximum time for a stopping replica to finish its streaming responses.",
            maximum=3600.0,
            flags=("drain-timeout",),
        ),
    ] = 120.0
