"""Worker processes render conversations within limits, and no conversation blocks another."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import server_children
from server_children import rendering_processes

from quire_engine.api.rendering import RenderLimits, RenderPool
from quire_engine.api.rendering_worker import Conversation
from quire_engine.config import AdmissionOptions
from quire_engine.errors import InvalidRequest, Unavailable
from quire_engine.text.chat_template import ChatTemplate

Serving = Callable[..., Any]

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
QUADRATIC = (
    "{% for m in messages %}{% set ns = namespace(users=0) %}"
    "{% for other in messages %}{% if other.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}{% endfor %}"
    "<{{ m.role }} {{ ns.users }}>{{ m.content }}{% endfor %}"
)
"""Like templates that search the last user message or tool call again for each message."""
GREEDY = (
    "{% set ns = namespace(text='x') %}{% for m in messages %}{% for n in range(40) %}"
    "{% set ns.text = ns.text ~ ns.text %}{% endfor %}{% endfor %}{{ ns.text }}"
)
QUICK = RenderLimits(cpu_seconds=0.2)


def chat(count: int, **options: Any) -> Conversation:
    return Conversation(messages=[{"role": "user", "content": f"{n}"} for n in range(count)], **options)


@asynccontextmanager
async def pool_of(source: str, limits: RenderLimits = QUICK) -> AsyncIterator[RenderPool]:
    pool = RenderPool(ChatTemplate(source, {"bos_token": "<s>"}), limits)
    try:
        yield pool
    finally:
        await pool.close()


async def refused(pool: RenderPool, conversation: Conversation) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        await pool.render(conversation)
    assert caught.value.param == "messages"
    return caught.value.code


async def test_a_worker_renders_with_the_models_tokens() -> None:
    async with pool_of("{{ bos_token }}" + PLAIN) as pool:
        await pool.start()
        assert await pool.render(chat(2)) == "<s><user>0<user>1"
        assert len(rendering_processes(os.getpid())) == 1
    assert rendering_processes(os.getpid()) == []


async def test_slow_template_is_refused_and_its_worker_continues() -> None:
    async with pool_of(QUADRATIC) as pool:
        assert await pool.render(chat(2)) == "<user 2>0<user 2>1"
        assert await refused(pool, chat(10_000)) == "template_too_slow"
        workers = set(rendering_processes(os.getpid()))
        assert await refused(pool, chat(10_000)) == "template_too_slow"
        assert set(rendering_processes(os.getpid())) == workers


async def test_unresponsive_worker_is_replaced() -> None:
    async with pool_of(PLAIN, replace(QUICK, wall_seconds=0.5)) as pool:
        await pool.start()
        (worker,) = rendering_processes(os.getpid())
        os.kill(worker, signal.SIGSTOP)
        assert await refused(pool, chat(1)) == "template_too_slow"
        assert await pool.render(chat(1)) == "<user>0"
        assert worker not in rendering_processes(os.getpid())


async def test_crashed_worker_fails_only_its_conversation() -> None:
    async with pool_of(QUADRATIC, RenderLimits()) as pool:
        await pool.start()
        (worker,) = rendering_processes(os.getpid())
        os.kill(worker, signal.SIGSTOP)
        rendering = asyncio.create_task(refused(pool, chat(1)))
        await asyncio.sleep(0)  # the conversation has its worker now
        os.kill(worker, signal.SIGKILL)
        assert await rendering == "template_failed"
        assert await pool.render(chat(1)) == "<user 1>0"


async def test_memory_of_a_template_is_bounded() -> None:
    async with pool_of(GREEDY, replace(QUICK, cpu_seconds=20.0)) as pool:
        assert await refused(pool, chat(1)) == "template_too_large"


async def test_prompt_beyond_the_context_is_refused_by_the_worker() -> None:
    async with pool_of(PLAIN) as pool:
        assert await refused(pool, chat(10, max_characters=69)) == "context_length_exceeded"
        assert len(await pool.render(chat(10, max_characters=70))) == 70


async def test_short_conversations_do_not_wait_for_long_ones() -> None:
    async with pool_of(QUADRATIC, RenderLimits(cpu_seconds=30.0)) as pool:
        long = [asyncio.create_task(pool.render(chat(10_000))) for _ in range(3)]
        for _ in range(5):
            assert await pool.render(chat(1)) == "<user 1>0"
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        assert await pool.render(chat(200)) != ""


async def test_conversations_that_wait_are_bounded_in_number_and_time() -> None:
    async with pool_of(QUADRATIC, RenderLimits(cpu_seconds=30.0, max_waiting=1, wait_seconds=0.2)) as pool:
        running, waiting = (asyncio.create_task(pool.render(chat(10_000))) for _ in range(2))
        await asyncio.sleep(0)
        for attempt in (pool.render(chat(10_000)), waiting):
            with pytest.raises(Unavailable) as caught:
                await attempt
            assert caught.value.code == "template_busy" and caught.value.retry_after_seconds
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await pool.render(chat(200)) != ""


async def test_server_answers_while_hostile_chats_are_rendered(serving: Serving) -> None:
    """The event loop renders nothing: its longest pause is far below the time of one rendering."""
    async with pool_of(QUADRATIC, QUICK) as pool, serving("ok", renderer=pool) as server:
        messages = [{"role": "user", "content": "x"}] * 500
        hostile = [asyncio.create_task(server.chat(messages=messages)) for _ in range(2)]
        alive = 0
        while not all(task.done() for task in hostile):
            assert (await server.http.get("/livez")).status_code == 200
            alive += 1
        assert {task.result().status_code for task in hostile} <= {200, 400}
        assert alive > 2


async def test_more_messages_than_tokens_of_context_are_not_rendered(serving: Serving) -> None:
    async with pool_of(PLAIN) as pool, serving("ok", renderer=pool) as server:
        refusal = await server.chat(messages=[{"role": "user", "content": ""}] * 513)
        assert refusal.status_code == 400 and refusal.json()["error"]["code"] == "context_length_exceeded"
        assert refusal.json()["error"]["param"] == "messages"
        assert rendering_processes(os.getpid()) == []


async def test_a_full_queue_refuses_before_anything_is_rendered(serving: Serving) -> None:
    async with (
        pool_of(PLAIN) as pool,
        serving(renderer=pool, admission=AdmissionOptions(max_queued_requests=1)) as server,
    ):
        queued = asyncio.create_task(server.complete())
        stream = await server.engine.stream()
        for refusal in (
            await server.chat(),
            await server.complete(prompt="x" * 400),
            await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}),
            await server.http.post("/tokenize", json={"prompt": "Hi"}),
            await server.http.post("/detokenize", json={"tokens": [1]}),
        ):
            assert refusal.status_code == 429 and int(refusal.headers["retry-after"]) >= 1
        assert rendering_processes(os.getpid()) == []
        stream.draw([1], "length")
        assert (await queued).status_code == 200
        assert server.queue.requests == 0


def test_a_worker_ends_with_its_server() -> None:
    program = (
        "import asyncio, os\n"
        "from quire_engine.api.rendering import RenderPool\n"
        "from quire_engine.text.chat_template import ChatTemplate\n"
        "from server_children import rendering_processes\n"
        "async def main():\n"
        "    await RenderPool(ChatTemplate('x', {})).start()\n"
        "    print(*rendering_processes(os.getpid()), flush=True)\n"
        "    os._exit(9)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(server_children.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    worker = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
