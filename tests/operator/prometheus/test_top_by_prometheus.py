"""``quire top --prometheus-url`` with a real Prometheus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire_cli.inspection.load import Reading, Replica, figures, growth
from quire_cli.inspection.replicas import PrometheusPages
from quire_common.contract import engine as m

Start = Callable[[], Awaitable[Any]]


def _replica(id: str, url: str | None) -> Replica:
    return Replica(id=id, name=id, phase="Ready", url=url)


async def scraped(pages: PrometheusPages, asked: Replica, waiting: float) -> Reading:
    """Return the replica's reading once Prometheus has this value."""
    async with asyncio.timeout(120):
        while True:
            answer = (await pages.read([asked]))[asked.id]
            if isinstance(answer, Reading) and answer.values[m.WAITING] == waiting:
                return answer
            await asyncio.sleep(0.1)


async def test_values_are_the_latest_prometheus_scraped(server: Any, engine: Start) -> None:
    replica = await engine()
    replica.waiting, replica.generated = 3, 100
    server.show(replica.address)
    pages = PrometheusPages(server.url)
    asked = _replica("chat-0", f"http://{replica.address}/metrics")
    try:
        first = await scraped(pages, asked, 3)
        replica.waiting, replica.generated = 5, 400
        second = await scraped(pages, asked, 5)
        told = figures([growth(first, second)])
        assert second.time > first.time, "as of the scrape, not of the question"
        assert told.generation_tokens_per_second is not None and told.generation_tokens_per_second > 0
        assert told.kv_percent == 50.0
        assert await pages.earlier() == {}, "a minute ago there was nothing"
        assert (await pages.read([_replica("gone", "http://127.0.0.1:1/metrics")]))["gone"] == (
            "Prometheus has no figures for it"
        )
        server.kill()
        silence = (await pages.read([asked]))[asked.id]
        assert isinstance(silence, str) and silence.startswith("no answer from Prometheus: ")
    finally:
        await pages.close()


async def test_pods_are_matched_by_name(server: Any, engine: Start) -> None:
    replica = await engine()
    server.show(replica.address, namespace="prod", pod="chat-0")
    pages = PrometheusPages(server.url)
    try:
        found = await scraped(pages, _replica("prod/chat-0", None), 0)
        assert found.values[m.RUNNING] == 0
    finally:
        await pages.close()
