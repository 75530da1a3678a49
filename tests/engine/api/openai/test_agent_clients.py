"""Agent libraries, unchanged, against the engine's server and against a gateway in front of it.

The engine's model is scripted: it calls get_weather for a question, answers with the tool's result, and follows the
grammar of a request. Everything between the library and the sampled tokens is real.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "clients" / "scripts"
PYTHON = Path(__file__).parents[4] / ".venv-clients" / "bin" / "python"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SKY = {"sky": "rain", "warm": False}


def says(prompt: str) -> str:
    """Return a call, and an answer with the tool's result once the prompt has it."""
    result = re.search(r"<tool>(.*)", prompt, re.DOTALL)
    return CALL if result is None else f"In Paris: {result[1]}."


def forced(grammar: str) -> str:
    """Return what a model under the grammar writes: an object, or an array with a call of the tool that it names."""
    rules = "\n".join(part.get("lark_grammar", "") for part in json.loads(grammar)["grammars"])
    name = re.search(r'^T\d+: "\\"(\w+)\\""$', rules, re.MULTILINE)
    return json.dumps(SKY if name is None else [{"name": name[1], "parameters": SKY}])


@asynccontextmanager
async def gateway_to(engine: str, folder: Path) -> AsyncIterator[str]:
    """Yield the address of a gateway in front of one engine."""
    endpoints = folder / "endpoints.json"
    endpoints.write_text(json.dumps({"models": [{"name": "demo", "endpoints": [{"id": "demo-0", "url": engine}]}]}))
    command = [sys.executable, "-m", "quire_gateway", "--endpoints-file", str(endpoints), "--host", "127.0.0.1"]
    process = await asyncio.create_subprocess_exec(*command, "--port", "0", stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    log = ""
    try:
        while (found := re.search(r"listening on (http://[\d.:]+)", log)) is None:
            line = (await process.stderr.readline()).decode()
            assert line, log
            log += line
        reading = asyncio.create_task(process.stderr.read())
        yield found[1]
    finally:
        process.kill()
        await process.wait()
    await reading


async def run_script(script: str, address: str, calls: int) -> None:
    assert PYTHON.is_file(), "there is no .venv-clients: run make setup-dev"
    client = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(SCRIPTS / script), address, "any-key-1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    written, errors = await client.communicate()
    assert client.returncode == 0, f"after {written.decode().split()}:\n{errors.decode()[-3000:]}"
    assert len(written.decode().split()) == calls


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ("openai_tools_calls.py", 7),
        *(
            pytest.param(script, calls, marks=pytest.mark.slow)
            for script, calls in [
                ("openai_agents_calls.py", 6),
                ("pydantic_ai_calls.py", 8),
                ("instructor_calls.py", 8),
                ("agent_frameworks_calls.py", 13),
            ]
        ),
    ],
)
async def test_agents_call_tools_and_get_types(
    serving: Callable[..., Any], tmp_path: Path, script: str, calls: int
) -> None:
    options: Any = {"forced": forced, "template": TEMPLATE, "max_model_len": 16_384}
    async with serving(says, **options) as server, gateway_to(server.address, tmp_path) as gateway:
        for address in (server.address, gateway):
            await run_script(script, address, calls)
