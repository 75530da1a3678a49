"""The reasons of scaling decisions: one word each, for conditions, events and metrics."""

from enum import StrEnum


class Reason(StrEnum):
    # Signals that require replicas.
    WORK = "ArrivingWork"
    KV_DEMAND = "KVDemand"
    CONCURRENCY = "Concurrency"
    QUEUE_DEPTH = "QueueDepth"
    KV_USAGE = "KVUsage"
    FIRST_TOKEN = "TimeToFirstToken"
    """firstTokenWait is missed. The word is that of the target's former name, which alerts and dashboards know."""
    TOTAL_FIRST_TOKEN = "TotalTimeToFirstToken"
    TOKEN_GAP = "InterTokenLatency"
    HELD = "HeldRequests"
    ACTIVITY = "Activity"
    # Decisions that do not depend on demand.
    BOUNDS = "OutOfBounds"
    SCHEDULE = "Schedule"
    METRICS_STALE = "MetricsStale"
    NO_GATEWAY = "GatewayUnavailable"
    # Reasons to stay at the current number.
    STEADY = "Steady"
    STARTING = "Starting"
    AT_MAX = "AtMaxReplicas"
    SCALE_UP_WINDOW = "ScaleUpWindow"
    SCALE_UP_LIMIT = "ScaleUpLimit"
    RESTARTED = "Restarted"
    ROLLING_OUT = "RollingOut"
    METRICS_PARTIAL = "MetricsPartial"
    SCALE_DOWN_WINDOW = "ScaleDownWindow"
    SCALE_DOWN_LIMIT = "ScaleDownLimit"
    # Reasons to scale down.
    DEMAND_FELL = "DemandFell"
