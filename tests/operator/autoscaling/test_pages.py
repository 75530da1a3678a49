"""GET over loopback: invalid answers and their reasons."""

import asyncio
import gzip

import pytest
from aiohttp import web

from quire_operator.autoscaling.scrape import NoPage, Pages

BOMB = gzip.compress(bytes(2**24))


@pytest.fixture
async def served():
    """Yield the address of a server that answers by path."""

    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/good":
                return web.Response(text="all is well")
            case "/stuck":
                await asyncio.Event().wait()
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(80):
                    await response.write(b" " * 2**16)
                return response
            case "/bomb":
                assert request.headers["Accept-Encoding"] == "identity"
                return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})
            case "/short":
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b"half")
                request.transport.close()
                return response
            case "/moved":
                raise web.HTTPFound("/good")
        return web.Response(status=503)

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def pages():
    opened = Pages(timeout_seconds=60, max_bytes=2**20)
    yield opened
    await opened.aclose()


@pytest.fixture
async def hurried():
    opened = Pages(timeout_seconds=0.2, max_bytes=2**20)
    yield opened
    await opened.aclose()


async def test_page_is_read_completely(served, pages):
    assert await pages.read(f"{served}/good") == b"all is well"


async def test_page_is_not_decompressed(served, pages):
    assert await pages.read(f"{served}/bomb") == BOMB


@pytest.mark.parametrize(
    ("path", "reason"), [("/missing", "http"), ("/moved", "http"), ("/endless", "bad_answer"), ("/short", "bad_answer")]
)
async def test_failed_page_read_has_a_reason(served, pages, path, reason):
    with pytest.raises(NoPage) as refused:
        await pages.read(f"{served}{path}")
    assert refused.value.reason == reason
    assert str(refused.value)


async def test_slow_page_read_times_out_with_a_reason(served, hurried):
    with pytest.raises(NoPage, match="no answer within 0.2 s") as refused:
        await hurried.read(f"{served}/stuck")
    assert refused.value.reason == "timeout"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "http://[::1", "nonsense"])
async def test_unreachable_address_is_reported(pages, url):
    with pytest.raises(NoPage) as refused:
        await pages.read(url)
    assert refused.value.reason == "unreachable"
