"""Metrics from Prometheus: the queries, and the use of valid and invalid answers."""

import json
import math
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs

import httpx
import pytest

from quire_operator.autoscaling.engine_metrics import PrometheusOptions, ReplicaLabels
from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase
from quire_operator.autoscaling.prometheus import Prometheus

NOW, THEIRS = 5_000.0, 9_000.0
FIGURES = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.25,
    "quire_queued_tokens": 77,
    "vllm:generation_tokens_total": 500,
}
CACHE = {"num_gpu_blocks": "100", "block_size": "16"}


class SetClock:
    def __call__(self) -> float:
        return NOW


def element(labels: Mapping[str, str], value: float | str) -> dict[str, object]:
    return {"metric": dict(labels), "value": [THEIRS, str(value)]}


def pod(name: str, namespace: str = "prod") -> dict[str, str]:
    return {"namespace": namespace, "pod": name, "instance": "10.0.0.1:8000"}


def figures(labels: Mapping[str, str], **changed: float | str) -> list[dict[str, object]]:
    values = FIGURES | changed
    found = [element({"__name__": name, "engine": "0", **labels}, value) for name, value in values.items()]
    return [*found, element({"__name__": "vllm:cache_config_info", **CACHE, **labels}, 1)]


def scraped(labels: Mapping[str, str], age: float = 4.0) -> dict[str, object]:
    return element(labels, THEIRS - age)


def vector(elements: list[dict[str, object]], **more: object) -> httpx.Response:
    return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": elements}, **more})


def replica(name: str = "prod/a", *, address: str | None = "10.0.0.1:8000") -> ReplicaAddress:
    url = None if address is None else f"http://{address}/metrics"
    return ReplicaAddress(name=name, phase=ReplicaPhase.READY, metrics_url=url, by_prometheus=True)


class Server:
    """A server with chosen answers that records its requests."""

    def __init__(self, answer: Callable[[str], httpx.Response]) -> None:
        self.answer, self.requests = answer, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer(parse_qs(request.content.decode())["query"][0])


def server(found: list[dict[str, object]], times: list[dict[str, object]]) -> Server:
    return Server(lambda query: vector(times if "timestamp" in query else found))


@pytest.fixture
async def connect():
    made: list[Prometheus] = []

    def build(
        handler: Callable[[httpx.Request], httpx.Response],
        failed: Callable[[str], None] = lambda reason: None,
        **options: object,
    ) -> Prometheus:
        client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        options = PrometheusOptions(url="http://p:9090/", **options)
        made.append(Prometheus(options, clock=SetClock(), client=client, failed=failed))
        return made[-1]

    yield build
    for one in made:
        await one.aclose()


async def test_all_replicas_take_two_queries(connect):
    names = [f"prod/{number}" for number in range(50)]
    labels = [pod(name.partition("/")[2]) for name in names]
    asked = server([e for one in labels for e in figures(one)], [scraped(one) for one in labels])
    found = await connect(asked).samples([replica(name) for name in names])
    assert sorted(found) == sorted(names)
    assert [str(request.url) for request in asked.requests] == ["http://p:9090/api/v1/query"] * 2


async def test_query_result_becomes_a_sample_at_scrape_time(connect):
    found = await connect(server(figures(pod("a")), [scraped(pod("a"), age=7.0)])).samples([replica()])
    sample = found["prod/a"]
    assert (sample.running, sample.waiting, sample.queued_prompt_tokens) == (3, 2, 77)
    assert (sample.kv_tokens_capacity, sample.kv_tokens_used, sample.generation_tokens) == (1600, 400, 500)
    assert sample.time == NOW - 7.0, "the age counts, whatever the two clocks say"


async def test_series_of_deleted_pods_are_ignored(connect):
    """Their address may belong to another pod by now."""
    gone = server(figures(pod("gone")), [scraped(pod("gone"))])
    assert await connect(gone).samples([replica("prod/a", address="10.0.0.1:8000")]) == {}


async def test_replica_without_pod_labels_is_matched_by_address(connect):
    bare = {"instance": "127.0.0.1:40001"}
    found = await connect(server(figures(bare), [scraped(bare)])).samples([replica("chat-0", address=bare["instance"])])
    assert found["chat-0"].running == 3


async def test_label_names_are_configurable(connect):
    labels = {"kubernetes_namespace": "prod", "kubernetes_pod_name": "a"}
    asked = server(figures(labels), [scraped(labels)])
    options = ReplicaLabels(namespace="kubernetes_namespace", pod="kubernetes_pod_name")
    assert "prod/a" in await connect(asked, labels=options).samples([replica()])
    assert all(b"kubernetes_pod_name" in request.content for request in asked.requests)


async def test_engines_of_one_replica_are_summed(connect):
    two = [*figures(pod("a")), element({"__name__": "vllm:num_requests_running", "engine": "1", **pod("a")}, 5)]
    assert (await connect(server(two, [scraped(pod("a"))])).samples([replica()]))["prod/a"].running == 8


@pytest.mark.parametrize(
    ("found", "times"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(figures(pod("a")), [], id="no time"),
        pytest.param(figures(pod("a")), [scraped(pod("a"), age=math.nan)], id="time is not a number"),
        pytest.param(figures(pod("a"))[:2], [scraped(pod("a"))], id="too little"),
        pytest.param([element({"__name__": "vllm:num_requests_running"}, 1)], [element({}, 1)], id="no replica"),
    ],
)
async def test_incomplete_series_are_no_sample(connect, found, times):
    prometheus = connect(server(found, times))
    assert await prometheus.samples([replica()]) == {}
    assert prometheus.problem is None, "it did answer"


async def test_nan_values_reach_the_autoscaler_and_are_rejected(connect):
    odd = figures(pod("a"), **{"vllm:num_requests_running": "NaN"})
    assert math.isnan((await connect(server(odd, [scraped(pod("a"))])).samples([replica()]))["prod/a"].running)


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def hang(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("no answer within 10 s")


@pytest.mark.parametrize(
    ("handler", "said", "reason"),
    [
        pytest.param(refuse, "connection refused", "unreachable", id="down"),
        pytest.param(hang, "no answer", "timeout", id="hangs"),
        pytest.param(lambda r: httpx.Response(401, text="Unauthorized"), "HTTP 401", "unauthorized", id="not allowed"),
        pytest.param(lambda r: httpx.Response(503, text="<html>" + "x" * 9999), "HTTP 503", "http", id="a proxy's"),
        pytest.param(
            lambda r: httpx.Response(
                422, json={"status": "error", "errorType": "execution", "error": "too many samples"}
            ),
            "HTTP 422: too many samples",
            "query",
            id="its own refusal",
        ),
        pytest.param(
            lambda r: httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": [1]}}),
            "not an answer of its API",
            "bad_answer",
            id="another shape",
        ),
        pytest.param(lambda r: httpx.Response(200, content=b"\xff\xfe"), "not an answer", "bad_answer", id="not text"),
        pytest.param(
            lambda r: httpx.Response(200, content=b'{"status": "\xff"}'), "not an answer", "bad_answer", id="half text"
        ),
    ],
)
async def test_failed_query_gives_no_sample_and_a_reason(connect, handler, said, reason):
    reasons: list[str] = []
    prometheus = connect(handler, failed=reasons.append)
    assert await prometheus.samples([replica()]) == {}
    assert (reasons, prometheus.last_answer) == ([reason], 0.0)
    assert said in prometheus.problem
    assert len(prometheus.problem) < 600


@pytest.mark.parametrize("token", [b"\xff", "schlüssel".encode(), b"two\nlines"])
async def test_token_unfit_for_a_header_is_reported_with_the_reason(connect, tmp_path, token):
    file = tmp_path / "token"
    file.write_bytes(token)
    prometheus = connect(server(figures(pod("a")), [scraped(pod("a"))]), token_file=file)
    assert await prometheus.samples([replica()]) == {}
    assert "the token in" in prometheus.problem and "two" not in prometheus.problem


async def test_one_failed_query_of_two_gives_no_samples(connect):
    """Metrics without their age could be five minutes old."""
    half = Server(lambda query: httpx.Response(500) if "timestamp" in query else vector(figures(pod("a"))))
    prometheus = connect(half)
    assert await prometheus.samples([replica()]) == {}
    assert "HTTP 500" in prometheus.problem


async def test_problem_is_cleared_when_prometheus_answers(connect):
    good = server(figures(pod("a")), [scraped(pod("a"))])
    answers = [httpx.Response(502), httpx.Response(502)]
    prometheus = connect(lambda request: answers.pop() if answers else good(request))
    await prometheus.samples([replica()])
    assert prometheus.problem is not None
    assert await prometheus.samples([replica()])
    assert prometheus.problem is None


async def test_token_file_is_read_for_each_query(connect, tmp_path):
    token = tmp_path / "token"
    asked = server([], [])
    prometheus = connect(asked, token_file=token)
    for text in ("first", "second"):
        token.write_text(f"{text}\n")
        await prometheus.samples([replica()])
    sent = [request.headers["Authorization"] for request in asked.requests]
    assert sent == ["Bearer first"] * 2 + ["Bearer second"] * 2
    token.unlink()
    assert await prometheus.samples([replica()]) == {}
    assert "No such file" in prometheus.problem


async def test_no_replicas_cause_no_query(connect):
    asked = server([], [])
    assert await connect(asked).samples([]) == {}
    assert asked.requests == []


def test_responses_match_the_prometheus_api():
    """The fake has the documented shape, without which the tests above mean nothing.

    tests/operator/prometheus uses a real server.
    """
    body = json.loads(vector(figures(pod("a"))).content)
    assert body["data"]["result"][0].keys() == {"metric", "value"}
