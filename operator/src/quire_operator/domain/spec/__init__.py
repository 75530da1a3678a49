"""An LLMDeployment as values. ``Spec.parse(body) -> Spec | Invalid`` is the way in; the rest are its parts."""

from quire_operator.domain.fields import Problem
from quire_operator.domain.spec.deployment import Invalid, Spec
from quire_operator.domain.spec.engine import (
    GPU_RESOURCE,
    DType,
    Engine,
    KVCacheShare,
    KVCacheSize,
    Preemption,
    PrefixCaching,
    Resources,
    SchedulingPolicy,
)
from quire_operator.domain.spec.model import (
    ClaimSource,
    ExistingClaim,
    FileSource,
    HubSource,
    Model,
    NewClaim,
    Source,
)
from quire_operator.domain.spec.rollout import Drain, Rollout, RolloutStrategy
from quire_operator.domain.spec.scaling import (
    Autoscaling,
    AutoscalingMode,
    LatencyTarget,
    MetricsSource,
    ScaleDown,
    ScaleUp,
    ScalingTargets,
)

__all__ = [
    "GPU_RESOURCE",
    "Autoscaling",
    "AutoscalingMode",
    "ClaimSource",
    "DType",
    "Drain",
    "Engine",
    "ExistingClaim",
    "FileSource",
    "HubSource",
    "Invalid",
    "KVCacheShare",
    "KVCacheSize",
    "LatencyTarget",
    "MetricsSource",
    "Model",
    "NewClaim",
    "Preemption",
    "PrefixCaching",
    "Problem",
    "Resources",
    "Rollout",
    "RolloutStrategy",
    "ScaleDown",
    "ScaleUp",
    "ScalingTargets",
    "SchedulingPolicy",
    "Source",
    "Spec",
]
