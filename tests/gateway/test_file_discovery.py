"""The endpoints file: read again whenever it is replaced; an invalid one is ignored."""

import asyncio
import json

import pytest

from quire_common.contract.gateway import Endpoint, HoldPolicy, ModelEndpoints
from quire_gateway.endpoints.file import FileDiscovery, InvalidEndpoints, parse_endpoints


def listing(*urls: str, model: str = "chat") -> str:
    endpoints = [{"id": f"{model}-{n}", "url": url} for n, url in enumerate(urls)]
    return json.dumps({"models": [{"name": model, "endpoints": endpoints}]})


@pytest.fixture
async def watched(tmp_path):
    """Yield the file and a queue of published snapshots."""
    path = tmp_path / "endpoints.json"
    published: asyncio.Queue = asyncio.Queue()
    task = asyncio.create_task(FileDiscovery(path).run(published.put_nowait))
    yield path, published
    task.cancel()
    await asyncio.wait([task])


def replace(path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


async def test_created_and_replaced_file_is_read_each_time(watched):
    path, published = watched
    replace(path, listing("http://127.0.0.1:1"))
    async with asyncio.timeout(60):
        assert [e.url for e in (await published.get())["chat"].endpoints] == ["http://127.0.0.1:1"]
        replace(path, listing("http://127.0.0.1:2", "http://127.0.0.1:3"))
        assert [e.id for e in (await published.get())["chat"].endpoints] == ["chat-0", "chat-1"]
        path.write_text('{"models": []}')
        assert await published.get() == {}


@pytest.mark.parametrize("broken", [b'{"models": [', b'{"models": [{"name": "\xff"}]}', b'{"later": ' + b"[" * 10_000])
async def test_broken_file_keeps_the_last_set_and_logs_once(watched, caplog, broken):
    path, published = watched
    replace(path, listing("http://127.0.0.1:1"))
    async with asyncio.timeout(60):
        await published.get()
        path.write_bytes(broken)
        while not caplog.records:
            await asyncio.sleep(0.01)
        replace(path, listing("http://127.0.0.1:2"))
        # Nothing was published for the broken one.
        assert [e.url for e in (await published.get())["chat"].endpoints] == ["http://127.0.0.1:2"]
    assert len(caplog.records) == 1
    assert "keeping the previous endpoints" in caplog.text


async def test_deleted_file_keeps_the_last_endpoints(watched, caplog):
    path, published = watched
    replace(path, listing("http://127.0.0.1:1"))
    async with asyncio.timeout(60):
        await published.get()
        path.unlink()
        while not caplog.records:
            await asyncio.sleep(0.01)
        replace(path, listing("http://127.0.0.1:1"))
        await published.get()
    assert "No such file" in caplog.text


def test_states_default_to_ready():
    text = '{"models": [{"name": "m", "endpoints": [{"id": "a", "url": "http://h:1/"}]}], "later": 1}'
    endpoint = Endpoint(id="a", url="http://h:1", ready=True, serving=True, terminating=False)
    assert parse_endpoints(text.encode()) == {"m": ModelEndpoints(name="m", endpoints=(endpoint,))}


def test_policy_for_held_requests_can_be_set():
    text = '{"models": [{"name": "m", "endpoints": [], "hold": {"timeout_seconds": 9, "start_up_seconds": 2.5}}]}'
    assert parse_endpoints(text.encode())["m"].hold == HoldPolicy(timeout_seconds=9, start_up_seconds=2.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"models": [{"name": "m"}]}', "missing required field `endpoints`"),
        ('{"models": [{"name": "m", "endpoints": [{"id": "a", "url": "h:1"}]}]}', "http://HOST:PORT"),
        ('{"models": [{"name": "m", "endpoints": [{"id": "a", "url": "http://h:1/v1"}]}]}', "http://HOST:PORT"),
        ('{"models": [{"name": "m", "endpoints": []}, {"name": "m", "endpoints": []}]}', "listed twice"),
        ('{"models": [{"name": "m", "endpoints": [{"id": "a", "url": "http://h:x"}]}]}', "http://HOST:PORT"),
        (
            '{"models": [{"name": "m", "endpoints": [{"id": "a", "url": "http://h:1"}, {"id": "a", "url": "http://h:2"}]}]}',
            "endpoint 'a' is listed twice",
        ),
    ],
)
def test_unreadable_file_is_reported_with_a_reason(text, words):
    with pytest.raises(InvalidEndpoints, match=words):
        parse_endpoints(text.encode())
