"""One request to the fake server, as the driver sends it."""

import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from e2e_support.traffic.answer import Form
from e2e_support.traffic.client import Address, Ask, Exchange, Patience, send
from e2e_support.traffic.fake_server import PROMPT, Server
from e2e_support.traffic.prompts import Prompt
from e2e_support.traffic.result import Record


@pytest.fixture
def ask(server: Server) -> Callable[..., Awaitable[Record]]:
    async def once(
        prompt: Prompt = PROMPT, form: Form = Form.STREAM, *, beyond: int = 0, silence_seconds: float = 60.0
    ) -> Record:
        exchange = Exchange(Ask(number=7, prompt=prompt, form=form, salted=False, beyond=beyond), time.monotonic())
        address = Address(url=server.url, model="demo")
        async with aiohttp.ClientSession() as session:
            return await send(session, address, exchange, Patience(silence_seconds=silence_seconds))

    return once
