"""``spec.autoscaling.targets``: what the autoscaler keeps, as load per replica and as latencies of requests."""

from dataclasses import dataclass
from typing import Annotated

from quire_operator.domain.resource.field_kinds import Duration, Integer
from quire_operator.domain.resource.schema import Section

_PERCENTILE = Integer("Percentage of requests that must meet the threshold.", minimum=1, maximum=99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """The share of first tokens that wait at most ``threshold_seconds`` beyond their own prefill."""

    percentile: Annotated[int, _PERCENTILE] = 95
    threshold_seconds: Annotated[float, Duration("Maximum waiting time.", minimum=0.001, maximum=3600.0)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTarget:
    """The share of first tokens that come within ``threshold_seconds`` after their request."""

    percentile: Annotated[int, _PERCENTILE] = 95
    threshold_seconds: Annotated[
        float, Duration("Maximum time from the arrival of a request to its first token.", minimum=0.001, maximum=3600.0)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGapTarget:
    """The share of tokens that follow the one before within ``threshold_seconds``."""

    percentile: Annotated[int, Integer("Percentage of tokens that must meet the threshold.", minimum=1, maximum=99)] = (
        95
    )
    threshold_seconds: Annotated[
        float, Duration("Maximum time between two tokens of an answer.", minimum=0.001, maximum=60.0)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """The maximum load of one replica. Queue and KV bound the demand from below where a person sets them."""

    queue_depth: Annotated[
        int | None,
        Integer(
            "Target number of waiting requests per replica. If unset, only the measured demand is used.", minimum=1
        ),
    ] = None
    kv_usage_percent: Annotated[
        int | None,
        Integer(
            "Target KV cache usage per replica, in percent. If unset, only the measured demand is used.",
            minimum=1,
            maximum=100,
        ),
    ] = None
    first_token_wait: Annotated[
        LatencyTarget | None,
        Section(
            "Target for the time that a request waits before its first token, in addition to the computation of its "
            "own prompt. More replicas always shorten it. Default is 1s for 95 %."
        ),
    ] = None
    total_time_to_first_token: Annotated[
        FirstTokenTarget | None,
        Section(
            "Target for the whole time to the first token, with the computation of the prompt. Replicas are added only "
            "while they help: none of them computes a single prompt faster."
        ),
    ] = None
    inter_token_latency: Annotated[
        TokenGapTarget | None,
        Section(
            "Target for the time between tokens. It limits how many requests a replica runs at once. Replicas are "
            "added only while they help."
        ),
    ] = None
    time_to_first_token: Annotated[
        LatencyTarget | None,
        Section("Deprecated name of firstTokenWait. If both are set, firstTokenWait applies."),
    ] = None

    @property
    def wait(self) -> LatencyTarget:
        """The target for the waiting time of first tokens, under either name."""
        return self.first_token_wait or self.time_to_first_token or LatencyTarget()
