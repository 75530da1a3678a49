"""The small pure parts: events, headers, scraped pages, tokens per byte, the command line."""

import gc
import socket

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from quire_common.contract import engine as m
from quire_common.errors import FlagsError
from quire_gateway import __main__, headers
from quire_gateway.__main__ import main
from quire_gateway.config import FileSource, KubernetesSource, parse_config
from quire_gateway.event_stream import EventSplitter
from quire_gateway.prompt import TokensPerByte, peek_request
from quire_gateway.scrape import computed_tokens, parse_page

# --- events ---


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"\n\n", b"\r\n\r\n", b"data: x\n\n"]), max_size=30))
def test_events_are_forwarded_unchanged(chunks):
    splitter = EventSplitter()
    out = [splitter.feed(chunk) for chunk in chunks]
    for piece in out:
        assert not piece or piece.endswith((b"\n\n", b"\r\n\r\n"))
    assert b"".join(out) + splitter.flush() == b"".join(chunks)


def test_event_without_end_does_not_fill_memory():
    splitter = EventSplitter()
    assert sum(len(splitter.feed(b"x" * 2**16)) for _ in range(40)) > 2**20


# --- headers ---


def proxied(**values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in values.items()}))


def test_hop_by_hop_headers_are_dropped():
    given = proxied(Connection="keep-alive, X-Mine", X_Mine="1", TE="trailers", Host="h", Accept="*/*", Upgrade="h2c")
    request = make_mocked_request("POST", "/", headers=given)
    assert dict(headers.to_replica(request, audience="chat", request_id="i")) == {
        "Accept": "*/*",
        "X-Request-Id": "i",
        "X-Forwarded-For": "unknown",
    }


SAFE = {"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff", "X-Request-Id": "i"}


def test_answer_headers_are_kept():
    given = {
        "Content-Type": "text/event-stream",
        "Retry-After": "3",
        "x-quire-max-tokens": "5",
        "X-RateLimit-Limit-Tokens": "9",
        "X-Accel-Buffering": "no",
        "traceparent": "00-1-2-3",
    }
    dropped = {"Transfer-Encoding": "chunked", "Server": "uvicorn", "Content-Length": "3", "X-Quire-Replica": "other"}
    passed = headers.to_client(CIMultiDictProxy(CIMultiDict(given | dropped)), request_id="i", replica="llm/chat-0")
    assert dict(passed) == given | SAFE | {"X-Quire-Replica": "llm/chat-0"}


@pytest.mark.parametrize(
    "name",
    [
        "Set-Cookie",
        "Access-Control-Allow-Origin",
        "Access-Control-Allow-Credentials",
        "Location",
        "Refresh",
        "Clear-Site-Data",
        "Strict-Transport-Security",
        "Service-Worker-Allowed",
        "Alt-Svc",
        "X-Accel-Redirect",
        "X-Sendfile",
    ],
)
def test_replica_cannot_speak_for_the_shared_address(name):
    given = CIMultiDictProxy(CIMultiDict({name: "x", "Content-Security-Policy": "default-src *"}))
    assert dict(headers.to_client(given, request_id="i", replica=None)) == SAFE


def test_replica_cannot_ask_for_a_password_of_the_shared_address():
    given = proxied(WWW_Authenticate='Basic realm="login"')
    assert headers.to_client(given, request_id="i", replica=None)["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("given", ["", "x" * 129, "a\nb", "é", "a b"])
def test_unsafe_request_ids_are_replaced(given):
    request = make_mocked_request("POST", "/", headers=proxied(X_Request_Id=given))
    assert headers.request_id(request) != given
    assert headers.request_id(request) == headers.request_id(request)


# --- scraped pages ---

PAGE = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop"} 5
vllm:request_success_total{engine="0",finished_reason="length"} 2
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 9
"""


def test_page_is_summed_over_engines_and_reasons():
    page = parse_page(PAGE)
    assert page is not None
    assert [page[name] for name in (m.RUNNING, m.WAITING, m.KV_USAGE, m.FINISHED)] == [4, 2, 0.25, 7]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        PAGE.replace("num_requests_waiting", "other"),
        PAGE.replace("0.25", "NaN"),
        PAGE.replace("0.25", "Inf"),
        PAGE.replace("0.25", "-1"),
        PAGE.replace("0.25", "x"),
        PAGE.replace('{engine="0"} 2', '{engine="0'),
        PAGE + 'vllm:cache_config_info{num_gpu_blocks="' + "9" * 400 + '",block_size="16"} 1\n',
    ],
)
def test_metrics_page_without_load_is_none(text):
    assert parse_page(text) is None


QUIRE_PAGE = (
    PAGE
    + """\
quire_pending_prefill_tokens{engine="0"} 700
quire_pending_prefill_tokens{engine="1"} 50
quire_max_running_requests{engine="0"} 64
quire_max_model_len{engine="0"} 4096
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:generation_tokens_total{engine="0"} 300
quire_scheduled_tokens_total{engine="0"} 5300
quire_step_seconds_total{engine="0",part="run"} 9.5
quire_step_seconds_total{engine="0",part="sample"} 0.5
quire_arrived_requests_total{engine="0"} 4
quire_arrived_prompt_tokens_total{engine="0"} 4000
"""
)


def test_page_of_an_engine_that_reports_prompt_tokens():
    page = parse_page(QUIRE_PAGE)
    assert page is not None and computed_tokens(page) == 5000
    names = (m.PENDING_TOKENS, m.MAX_RUNNING, m.CACHE_CONFIG, m.MAX_MODEL_LEN, m.STEP_SECONDS)
    assert [page[name] for name in names] == [750, 64, 1600, 4096, 10.0]
    assert [page[name] for name in (m.ARRIVED_REQUESTS, m.ARRIVED_PROMPT_TOKENS)] == [4, 4000]


def test_missing_metrics_are_absent():
    page = parse_page(PAGE + 'vllm:cache_config_info{block_size="None"} 1\n')
    assert page is not None and page[m.CACHE_CONFIG] == 0
    assert not page.keys() & {m.PENDING_TOKENS, m.MAX_RUNNING, m.MAX_MODEL_LEN}


def test_tokens_per_byte_are_the_engines_tokens_over_our_bytes():
    ratio = TokensPerByte()
    assert ratio.value == 0.25
    for _ in range(20):
        ratio.record_bytes(3000)
    assert ratio.value == 0.25
    ratio.record_tokens(90_000, 90)
    assert ratio.value == pytest.approx(1 / 3), "other gateways sent the rest"
    ratio.record_tokens(-5, -1)
    assert ratio.value == pytest.approx(1 / 3), "a counter that fell"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(10**6), 10**9), st.integers(-5, 500)), max_size=30))
def test_tokens_per_byte_stay_within_bounds(counts):
    ratio = TokensPerByte()
    for num_bytes, tokens, requests in counts:
        ratio.record_bytes(num_bytes)
        ratio.record_tokens(tokens, requests)
        assert 0.02 <= ratio.value <= 2.0


# --- requests ---


@pytest.mark.parametrize("text", [r"cut \ud83d", r"\udE42 cut, with more text behind it", r"whole \ud83d\ude42"])
def test_half_of_a_surrogate_pair_is_read_as_the_engine_reads_it(text):
    body = b'{"model": "chat", "prompt": "%s"}' % text.encode()
    assert peek_request(bytearray(body), is_generating=True).model == "chat"


# --- the command line ---


def test_flags_take_precedence_over_variables():
    environ = {"QUIRE_GATEWAY_PORT": "1", "QUIRE_GATEWAY_HOLD_TIMEOUT": "7", "QUIRE_GATEWAY_ENDPOINTS_FILE": "/e.json"}
    config = parse_config(["--port", "2"], environ)
    assert (config.port, config.proxy.hold_timeout_seconds) == (2, 7)
    assert isinstance(config.source, FileSource)


def test_service_links_of_kubernetes_are_ignored():
    """A Service named quire-gateway sets QUIRE_GATEWAY_PORT in every pod of its namespace."""
    links = {"QUIRE_GATEWAY_PORT": "tcp://10.0.0.1:80", "QUIRE_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert parse_config(["--kubernetes"], links) == parse_config(["--kubernetes"], {})


def test_repeated_namespace_flags_are_joined():
    config = parse_config(["--kubernetes", "--namespace", "a", "b", "--namespace", "c"], {})
    assert config.source == KubernetesSource(namespaces=("a", "b", "c"), kubeconfig=None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["either --endpoints-file FILE or --kubernetes"]),
        (["--endpoints-file", "f", "--kubernetes"], ["either --endpoints-file FILE or --kubernetes"]),
        (["--endpoints-file", "f", "--namespace", "n"], ["--namespace requires --kubernetes"]),
        (["--kubernetes", "--kubeconfig", "/no/such"], ["there is no file /no/such"]),
        (
            ["--wake-port=8001", "--kubernetes"],
            ["--wake-port was removed: requests to the Service of a model no longer wake it"],
        ),
        (["--prot", "80"], ["--prot is unknown; did you mean --port?", "either --endpoints-file FILE or --kubernetes"]),
        (["--port=x", "--endpoint-file=f"], ["did you mean --endpoints-file?", "--port: expected"]),
        (["--endpoints-file", "f", "8000"], ["unexpected argument '8000'"]),
        (
            ["--endpoints-file", "f", "--port", "70000", "--hold-timeout", "soon", "--max-attempts", "0"],
            ["--port: expected", "'70000'", "--hold-timeout: expected a duration", "--max-attempts"],
        ),
        (["--endpoints-file", "f", "--hold-timeout", "nan"], ["--hold-timeout"]),
        (["--endpoints-file", "f", "--log-level", "loud"], ["one of debug, info, warning, error, got 'loud'"]),
    ],
)
def test_every_problem_of_the_command_line_is_listed(argv, words):
    with pytest.raises(FlagsError) as caught:
        parse_config(argv, {})
    text = "\n".join(caught.value.problems)
    assert [word for word in words if word not in text] == []


def test_wrong_command_line_exits_with_2_and_no_traceback(capsys):
    assert main(["--port", "x"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("  - ") == 2
    assert "--help" in err


def test_garbage_collector_skips_objects_loaded_before_serving(monkeypatch, tmp_path):
    frozen = []

    async def run(config):
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(__main__, "_run", run)
    gc.unfreeze()
    try:
        assert main(["--endpoints-file", str(tmp_path / "e")]) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


def test_port_in_use_is_an_error(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--host", "127.0.0.1", "--port", port, "--endpoints-file", str(tmp_path / "e")]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
