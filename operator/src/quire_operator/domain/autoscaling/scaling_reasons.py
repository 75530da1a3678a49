"""Why a scaling decision is what it is: one word each, for conditions, events and metrics."""

from enum import StrEnum


class Reason(StrEnum):
    # What asks for replicas.
    WORK = "ArrivingWork"
    KV_DEMAND = "KVDemand"
    CONCURRENCY = "Concurrency"
    QUEUE_DEPTH = "QueueDepth"
    KV_USAGE = "KVUsage"
    FIRST_TOKEN = "TimeToFirstToken"
    HELD = "HeldRequests"
    ACTIVITY = "Activity"
    # What is decided without looking at demand.
    BOUNDS = "OutOfBounds"
    SCHEDULE = "Schedule"
    METRICS_STALE = "MetricsStale"
    NO_GATEWAY = "GatewayUnavailable"
    # What keeps things as they are.
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
    # On the way down.
    DEMAND_FELL = "DemandFell"
