"""The requests that gateways report, and the discovery of gateways."""

import pytest

from quire_operator.autoscaling.observation import GatewayRequests
from quire_operator.autoscaling.scrape import Gateways, NoPage
from quire_operator.kube.errors import Unavailable
from quire_operator.kube.gateway_pods import GatewayPods

ANSWERS = {
    "one": b'{"models": {"chat": {"held": 2, "inFlight": 1}, "idle": {"held": 0, "inFlight": 0}}}',
    "two": b'{"models": {"chat": {"held": 3, "inFlight": 0}, "org/big": {"held": 0, "inFlight": 4, "later": 1}}}',
    "empty": b'{"models": {}}',
    "html": b"<html>not here</html>",
    "text": b'{"models": {"chat": {"held": "many"}}}',
    "list": b"[]",
}


async def answer(url: str) -> bytes:
    host = url.removeprefix("http://").removesuffix(":8000/requests")
    if host not in ANSWERS:
        raise NoPage("connection refused", reason="unreachable")
    return ANSWERS[host]


async def ask(*hosts: str) -> tuple[GatewayRequests | None, Gateways]:
    async def addresses() -> list[str]:
        return [f"http://{host}:8000" for host in hosts]

    gateways = Gateways(addresses, read=answer)
    found = await gateways.requests()
    await gateways.aclose()
    return found, gateways


async def test_requests_are_summed_over_gateways():
    found, gateways = await ask("one", "two", "empty")
    assert found == GatewayRequests(held={"chat": 5}, in_flight={"chat": 1, "org/big": 4}, is_complete=True)
    assert (gateways.asked, gateways.answered) == (3, 3)


@pytest.mark.parametrize("other", ["dead", "html", "text", "list"])
async def test_failing_gateway_makes_the_sum_incomplete(other):
    found, gateways = await ask("one", other)
    assert found == GatewayRequests(held={"chat": 2}, in_flight={"chat": 1}, is_complete=False)
    assert (gateways.asked, gateways.answered) == (2, 1)


@pytest.mark.parametrize("hosts", [(), ("dead", "html")])
async def test_no_answering_gateway_means_unknown_requests(hosts):
    found, gateways = await ask(*hosts)
    assert found is None
    assert gateways.asked == len(hosts)


async def test_unreachable_gateway_is_logged_once(caplog):
    async def addresses() -> list[str]:
        return ["http://dead:8000"]

    gateways = Gateways(addresses, read=answer)
    for _ in range(3):
        await gateways.requests()
    await gateways.aclose()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def pod(ip: str = "10.0.0.1", *, ready: bool = True, deleting: bool = False, phase: str = "Running", port="http"):
    return {
        "metadata": {"name": "g", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {})},
        "spec": {"containers": [{"ports": [{"name": port, "containerPort": 8000}]}]},
        "status": {
            "podIP": ip,
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class Server:
    """An API server that has these pods."""

    def __init__(self, *pods: dict[str, object]) -> None:
        self.pods, self.asked, self.away = list(pods), [], False

    async def read(self, path, query):
        self.asked.append((path, dict(query)))
        if self.away:
            raise Unavailable("it is away")
        return {"items": self.pods}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([pod("10.0.0.2"), pod("10.0.0.1")], ("http://10.0.0.1:8000", "http://10.0.0.2:8000")),
        ([pod(port="https")], ("https://10.0.0.1:8000",)),
        ([pod("fd00::1")], ("http://[fd00::1]:8000",)),
        ([pod(ready=False), pod(phase="Pending"), pod(""), pod(port="other")], ()),
        ([pod(ready=False, deleting=True)], ("http://10.0.0.1:8000",)),
        ([pod(phase="Succeeded", deleting=True)], ()),
    ],
)
async def test_gateway_pods_that_run_are_polled(pods, expected):
    server = Server(*pods)
    found = GatewayPods(server.read, namespace="quire", selector="app=gateway")
    assert await found.addresses() == expected
    assert server.asked == [("/api/v1/namespaces/quire/pods", {"labelSelector": "app=gateway", "resourceVersion": "0"})]


async def test_pods_are_listed_periodically_and_kept_during_outages(caplog):
    server, now = Server(pod()), [0.0]
    found = GatewayPods(
        server.read, namespace="quire", selector="app=gateway", urls=("http://elsewhere",), now=lambda: now[0]
    )
    for second in range(5):
        now[0] = float(second)
        assert await found.addresses() == ("http://elsewhere", "http://10.0.0.1:8000")
        server.away = True
    assert len(server.asked) == 3
    assert caplog.text.count("listing gateways failed") == 1


async def test_no_gateways_are_listed_without_a_selector():
    server = Server(pod())
    found = GatewayPods(server.read, namespace="quire", selector=None, urls=("http://elsewhere",))
    assert await found.addresses() == ("http://elsewhere",)
    assert server.asked == []
