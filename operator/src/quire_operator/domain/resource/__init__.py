"""An LLMDeployment as values. ``Spec.parse(body) -> Spec | Invalid`` is the way in; the rest are its parts."""

from quire_common.model_source import (
    BucketSource,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    Source,
)
from quire_operator.domain.resource.deployment import Invalid, Spec
from quire_operator.domain.resource.engine import (
    GPU_RESOURCE,
    DType,
    Engine,
    KVCache,
    Preemption,
    PrefixCaching,
    PullPolicy,
    PullSecret,
    Resources,
    SchedulingPolicy,
)
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.model import AccessMode, Model, ModelCache
from quire_operator.domain.resource.rollout import Drain, Rollout, RolloutStrategy
from quire_operator.domain.resource.scaling import (
    Autoscaling,
    AutoscalingMode,
    LatencyTarget,
    MetricsSource,
    ScaleDown,
    ScaleToZero,
    ScaleUp,
    ScalingTargets,
    Schedule,
)
from quire_operator.domain.resource.windows import RecurringWindow

__all__ = [
    "AccessMode",
    "GPU_RESOURCE",
    "Autoscaling",
    "AutoscalingMode",
    "BucketSource",
    "ClaimSource",
    "DType",
    "Drain",
    "Engine",
    "FileSource",
    "HubSource",
    "ImageSource",
    "Invalid",
    "KVCache",
    "LatencyTarget",
    "MetricsSource",
    "Model",
    "ModelCache",
    "Preemption",
    "PrefixCaching",
    "Problem",
    "PullPolicy",
    "RecurringWindow",
    "PullSecret",
    "RemoteSource",
    "Resources",
    "Rollout",
    "RolloutStrategy",
    "ScaleDown",
    "ScaleToZero",
    "ScaleUp",
    "ScalingTargets",
    "Schedule",
    "SchedulingPolicy",
    "Source",
    "Spec",
]
