"""LLMDeployments and LLMAdapters as values: ``Spec.parse(body) -> Spec | Invalid`` and the parts of a spec."""

from quire_common.model_source import (
    BucketSource,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    Source,
)
from quire_operator.domain.resource.adapter import AdapterSpec
from quire_operator.domain.resource.adapter_slots import AdapterSlots
from quire_operator.domain.resource.canary import Canary, CanaryStep, Gate, GateMetric, OnFailure, OnInconclusive
from quire_operator.domain.resource.deployment import Invalid, Spec
from quire_operator.domain.resource.engine import (
    DType,
    Engine,
    KVCache,
    Preemption,
    PrefixCaching,
    PullPolicy,
    PullSecret,
    Resources,
    is_gpu,
)
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.model import AccessMode, Model, ModelCache, Retention
from quire_operator.domain.resource.parallelism import Parallelism
from quire_operator.domain.resource.rollout import Drain, Rollout, RolloutStrategy
from quire_operator.domain.resource.scaling import (
    Autoscaling,
    AutoscalingMode,
    MetricsSource,
    ScaleToZero,
    Schedule,
)
from quire_operator.domain.resource.scaling_limits import PolicyType, ScaleDown, ScaleUp, SelectPolicy, StepPolicy
from quire_operator.domain.resource.scaling_targets import (
    FirstTokenTarget,
    LatencyTarget,
    ScalingTargets,
    TokenGapTarget,
)
from quire_operator.domain.resource.speculation import Draft, Speculation, SpeculationMethod
from quire_operator.domain.resource.windows import RecurringWindow

__all__ = [
    "AccessMode",
    "AdapterSlots",
    "AdapterSpec",
    "Autoscaling",
    "AutoscalingMode",
    "BucketSource",
    "Canary",
    "CanaryStep",
    "ClaimSource",
    "DType",
    "Draft",
    "Drain",
    "Engine",
    "FileSource",
    "FirstTokenTarget",
    "Gate",
    "GateMetric",
    "HubSource",
    "ImageSource",
    "Invalid",
    "KVCache",
    "LatencyTarget",
    "MetricsSource",
    "Model",
    "ModelCache",
    "OnFailure",
    "OnInconclusive",
    "Parallelism",
    "PolicyType",
    "Preemption",
    "PrefixCaching",
    "Problem",
    "PullPolicy",
    "RecurringWindow",
    "PullSecret",
    "RemoteSource",
    "Resources",
    "Retention",
    "Rollout",
    "RolloutStrategy",
    "ScaleDown",
    "ScaleToZero",
    "ScaleUp",
    "ScalingTargets",
    "Schedule",
    "SelectPolicy",
    "Source",
    "Spec",
    "Speculation",
    "SpeculationMethod",
    "StepPolicy",
    "TokenGapTarget",
    "is_gpu",
]
