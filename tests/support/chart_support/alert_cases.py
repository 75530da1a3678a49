"""Cases for the chart's alerts: when each one fires, when it does not, when it resolves, and its texts.

Series are in promtool's notation, one sample a minute: `3+0x20` is 3 and twenty more of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]

CHAT = {"namespace": "prod", "name": "chat"}
MODEL = {"namespace": "prod", "model_name": "chat"}
GATEWAY = {"namespace": "quire-system", "model": "chat"}
OPERATOR = {"namespace": "quire-system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    alert: str
    series: Mapping[str, str]
    quiet: tuple[int, ...]
    """Minutes at which the alert does not fire: too early, or resolved."""
    fires: int
    """A minute at which the alert fires."""
    labels: Labels
    """Labels of the only alert that fires, without the severity."""
    summary: str
    description: str


_OF_QUIRE = 'quire_kv_blocks{{namespace="prod",model_name="chat",pod="{}",state="free"}}'
"""A series that only quire's engines have."""

CASES = (
    Case(
        alert="QuireNoReplicaReady",
        series={
            'quire_operator_llmdeployment_replicas{namespace="prod",name="chat",state="asked"}': "2+0x40",
            'quire_operator_llmdeployment_replicas{namespace="prod",name="chat",state="ready"}': "0+0x20 1+0x20",
            'quire_operator_llmdeployment_replicas{namespace="prod",name="zero",state="asked"}': "0+0x40",
            'quire_operator_llmdeployment_replicas{namespace="prod",name="zero",state="ready"}': "0+0x40",
        },
        quiet=(9, 22),
        fires=10,
        labels=CHAT,
        summary="prod/chat has no ready replica",
        description="2 replicas are requested, but none has been ready for 10m. Requests wait in the gateway or fail.",
    ),
    Case(
        alert="QuireRolloutStuck",
        series={
            _condition: "1+0x20 stale"
            for _condition in (
                'quire_operator_llmdeployment_condition{namespace="prod",name="chat",type="Progressing",status="False",'
                'reason="ImagePullFailed"}',
                'quire_operator_llmdeployment_condition{namespace="prod",name="done",type="Progressing",status="False",'
                'reason="Complete"}',
                'quire_operator_llmdeployment_condition{namespace="prod",name="new",type="Progressing",status="True",'
                'reason="RollingOut"}',
                'quire_operator_llmdeployment_condition{namespace="prod",name="new",type="Ready",status="False",'
                'reason="Starting"}',
            )
        },
        quiet=(14, 22),
        fires=15,
        labels=CHAT | {"reason": "ImagePullFailed"},
        summary="The rollout of prod/chat is stuck: ImagePullFailed",
        description="The condition Progressing has been False for 15m with reason ImagePullFailed. Replicas of the "
        "previous revision, if any, continue to serve.",
    ),
    Case(
        alert="QuireReplicaNotLoading",
        series={
            'quire_operator_llmdeployment_starting_seconds{namespace="prod",name="chat"}': "0+60x40 0+0x20",
            'quire_operator_llmdeployment_starting_seconds{namespace="prod",name="quick"}': "0+60x20 0+60x20 0+0x20",
        },
        quiet=(31, 45),
        fires=32,
        labels=CHAT,
        summary="A replica of prod/chat does not become ready",
        description="The replica has been starting for 32m 0s. It waits for a node, an image, the model's download or "
        "the loading of the weights.",
    ),
    Case(
        alert="QuireFreeKVBlocksLow",
        series={
            'quire_kv_blocks{namespace="prod",model_name="chat",pod="a",state="free"}': "50+0x5 4+0x20 50+0x20",
            'quire_kv_blocks{namespace="prod",model_name="chat",pod="a",state="cached"}': "0+0x50",
            'quire_kv_blocks{namespace="prod",model_name="chat",pod="a",state="used"}': "50+0x5 96+0x20 50+0x20",
            'quire_kv_blocks{namespace="prod",model_name="cached",pod="b",state="free"}': "2+0x50",
            'quire_kv_blocks{namespace="prod",model_name="cached",pod="b",state="cached"}': "30+0x50",
            'quire_kv_blocks{namespace="prod",model_name="cached",pod="b",state="used"}': "68+0x50",
            'quire_kv_blocks{namespace="prod",model_name="loading",pod="c",state="free"}': "0+0x50",
            'quire_kv_blocks{namespace="prod",model_name="loading",pod="c",state="used"}': "0+0x50",
        },
        quiet=(10, 30),
        fires=11,
        labels=MODEL,
        summary="chat in prod is running out of KV blocks",
        description="4.0 % of the KV blocks are free or contain only cached prefixes. Without free blocks, requests "
        "wait or are preempted.",
    ),
    Case(
        alert="QuireQueueNotDraining",
        series={
            'vllm:num_requests_waiting{namespace="prod",model_name="chat",pod="a"}': "8+0x40",
            'vllm:num_requests_waiting{namespace="prod",model_name="chat",pod="b"}': "5+0x15 0+0x25",
            'vllm:num_requests_waiting{namespace="prod",model_name="twice",pod="c",job="x"}': "8+0x40",
            'vllm:num_requests_waiting{namespace="prod",model_name="twice",pod="c",job="y"}': "8+0x40",
            'vllm:num_requests_waiting{namespace="prod",model_name="bursts",pod="d"}': "50+0x7 0 50+0x7 0 50+0x7",
            'vllm:num_requests_waiting{namespace="prod",model_name="vllm",pod="x"}': "99+0x40",
            **{_OF_QUIRE.format(pod): "1+0x40" for pod in "abcd"},
        },
        quiet=(9, 17),
        fires=10,
        labels=MODEL,
        summary="Requests queue up for chat in prod",
        description="13 requests wait in the queues of the replicas. For 10m there were more than 10.",
    ),
    Case(
        alert="QuireEngineErrors",
        series={
            'vllm:request_success_total{namespace="prod",model_name="chat",pod="a",finished_reason="error"}': (
                "0+10x20 200+0x20"
            ),
            'vllm:request_success_total{namespace="prod",model_name="chat",pod="a",finished_reason="stop"}': "0+90x40",
            'vllm:request_success_total{namespace="prod",model_name="well",pod="b",finished_reason="error"}': "0+1x40",
            'vllm:request_success_total{namespace="prod",model_name="well",pod="b",finished_reason="stop"}': "0+99x40",
            'vllm:request_success_total{namespace="prod",model_name="idle",pod="c",finished_reason="error"}': "9+0x40",
            'vllm:request_success_total{namespace="prod",model_name="left",pod="d",finished_reason="abort"}': "0+50x40",
            'vllm:request_success_total{namespace="prod",model_name="vllm",pod="x",finished_reason="error"}': "0+9x40",
            **{_OF_QUIRE.format(pod): "1+0x40" for pod in "abcd"},
        },
        quiet=(5, 27),
        fires=7,
        labels=MODEL,
        summary="Requests to chat in prod end in errors",
        description="10.0 % of the requests that finished in the last 5 minutes ended in an error.",
    ),
    Case(
        alert="QuireEngineRestarting",
        series={
            'quire_engine_restarts_total{namespace="prod",model_name="chat",pod="a"}': "0+0x29 1 2 3 3+0x60",
            'quire_engine_restarts_total{namespace="prod",model_name="once",pod="b"}': "0+0x29 1+0x60",
        },
        quiet=(30, 65),
        fires=35,
        labels=MODEL,
        summary="Engine processes of chat in prod restart repeatedly",
        description="Engine processes were restarted 3 times in the last 30 minutes. Their running requests were lost.",
    ),
    Case(
        alert="QuireMetricsStale",
        series={
            'quire_operator_autoscaling_reason{namespace="prod",name="chat",reason="MetricsStale"}': "1+0x10 stale",
            'quire_operator_autoscaling_reason{namespace="prod",name="calm",reason="Steady"}': "1+0x20",
        },
        quiet=(4, 12),
        fires=5,
        labels=CHAT | {"reason": "MetricsStale"},
        summary="The autoscaler of prod/chat has no current metrics: MetricsStale",
        description="The autoscaler has had no usable metrics for 5m. It keeps the current number of replicas.",
    ),
    Case(
        alert="QuireGatewayErrors",
        series={
            'quire_gateway_requests_total{namespace="quire-system",model="chat",backend="a",code="200"}': "0+80x40",
            'quire_gateway_requests_total{namespace="quire-system",model="chat",backend="a",code="500"}': (
                "0+5x20 100+0x20"
            ),
            'quire_gateway_errors_total{namespace="quire-system",model="chat",code="503",reason="no_replica_ready"}': (
                "0+15x20 300+0x20"
            ),
            'quire_gateway_requests_total{namespace="quire-system",model="well",backend="b",code="200"}': "0+100x40",
            'quire_gateway_errors_total{namespace="quire-system",code="404",reason="model_not_found"}': "0+100x40",
        },
        quiet=(5, 27),
        fires=7,
        labels=GATEWAY,
        summary="Clients of chat receive server errors",
        description="20.0 % of the gateway's answers in the last 5 minutes had a status of 500 or above.",
    ),
    Case(
        alert="QuireGatewayErrors",
        series={
            'quire_gateway_errors_total{namespace="quire-system",code="404",reason="not_found"}': "0+60x20",
            'quire_gateway_errors_total{namespace="quire-system",code="500",reason="internal_error"}': "0+20x20",
        },
        quiet=(5,),
        fires=7,
        labels=OPERATOR,
        summary="Clients of the gateway receive server errors",
        description="25.0 % of the gateway's answers in the last 5 minutes had a status of 500 or above.",
    ),
    Case(
        alert="QuireGatewayHoldingTooLong",
        series={
            'quire_gateway_held_requests{namespace="quire-system",model="chat",pod="a"}': "0+0x5 2+0x20 0+0x10",
            'quire_gateway_held_requests{namespace="quire-system",model="chat",pod="b"}': "0+0x5 1+0x20 0+0x10",
            'quire_gateway_held_requests{namespace="quire-system",model="wakes",pod="a"}': "0+0x5 9+0x3 0+0x20",
        },
        quiet=(10, 28),
        fires=11,
        labels=GATEWAY,
        summary="The gateway holds requests for chat",
        description="3 requests wait for a replica. For 5m there were more than 0. After the hold timeout the gateway "
        "answers 503.",
    ),
    Case(
        alert="QuireOperatorNotLeading",
        series={
            'quire_operator_leading{namespace="quire-system",pod="a"}': "1+0x5 0+0x20 1+0x10",
            'quire_operator_leading{namespace="quire-system",pod="b"}': "0+0x40",
            'quire_operator_leading{namespace="other",pod="c"}': "1+0x40",
        },
        quiet=(10, 27),
        fires=11,
        labels=OPERATOR,
        summary="No operator is leading",
        description="No operator has held the Lease for 5m. Running replicas continue to serve, but nothing is "
        "changed, repaired or scaled.",
    ),
    Case(
        alert="QuireOperatorNotLeading",
        series={},
        quiet=(4,),
        fires=5,
        labels={},
        summary="No operator is leading",
        description="No operator has held the Lease for 5m. Running replicas continue to serve, but nothing is "
        "changed, repaired or scaled.",
    ),
    Case(
        alert="QuireOperatorReconcileErrors",
        series={
            'quire_operator_reconcile_errors_total{namespace="quire-system",reason="Forbidden",pod="a"}': (
                "0+3x40 120+0x30"
            ),
            'quire_operator_reconcile_errors_total{namespace="quire-system",reason="Conflict",pod="a"}': "0+60x70",
            'quire_operator_reconcile_errors_total{namespace="quire-system",reason="Unavailable",pod="a"}': "0+1x70",
        },
        quiet=(15, 55),
        fires=18,
        labels=OPERATOR | {"reason": "Forbidden"},
        summary="The operator fails to reconcile: Forbidden",
        description="3.0 reconciles per minute fail with Forbidden. The operator retries them with backoff.",
    ),
    Case(
        alert="QuireOperatorQueueNotDraining",
        series={
            'quire_operator_queue_depth{namespace="quire-system",pod="a"}': "250+0x20 10+0x20",
            'quire_operator_queue_depth{namespace="quire-system",pod="b"}': "0+0x40",
            'quire_operator_queue_depth{namespace="starting",pod="c"}': "900 500 200 50 0+0x40",
        },
        quiet=(9, 22),
        fires=10,
        labels=OPERATOR,
        summary="The operator is falling behind",
        description="250 LLMDeployments wait for a reconcile. For 10m there were more than 100.",
    ),
    Case(
        alert="QuireOperatorKindUnlisted",
        series={
            'quire_operator_unlisted_kinds{namespace="quire-system",kind="NetworkPolicy",pod="a"}': "_x3 1+0x20 _x20",
            'quire_operator_leading{namespace="quire-system",pod="a"}': "1+0x43",
            'quire_operator_unlisted_kinds{namespace="quire-system",kind="Service",pod="b"}': "1+0x43",
            'quire_operator_leading{namespace="quire-system",pod="b"}': "0+0x43",
        },
        quiet=(12, 32),
        fires=14,
        labels=OPERATOR | {"kind": "NetworkPolicy"},
        summary="The operator must not list NetworkPolicy",
        description="For 10m the operator has had no permission to list NetworkPolicy. Objects of this kind are not "
        "watched, repaired or removed.",
    ),
    Case(
        alert="QuirePrometheusUnreachable",
        series={
            'quire_operator_prometheus_errors_total{namespace="quire-system",reason="timeout",pod="a"}': (
                "0+4x30 120+0x20"
            ),
            'quire_operator_prometheus_errors_total{namespace="quire-system",reason="http",pod="a"}': "0+0x10 1+0x40",
        },
        quiet=(5, 37),
        fires=12,
        labels=OPERATOR | {"reason": "timeout"},
        summary="Prometheus does not answer the operator: timeout",
        description="20 of the queries in the last 5 minutes (one every 15 s) failed. LLMDeployments that scale by "
        "Prometheus keep their number of replicas.",
    ),
)
